"""Derives Megatron's model flags from a config.json: the rules that families share.

A rule takes the config and yields a :class:`Flag` for each setting, or a line of text for a setting that no flag can
express.  ``flags/hf_config_check.py`` fills in the flags that were not given and compares those that were.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from slime.utils.errors import ConfigError

Config = Mapping[str, Any]

# YaRN's settings (arXiv 2309.00071) come from the checkpoint's config: Megatron's defaults (a factor of 40) would
# silently distort the positions of a model that was never stretched.
YARN_DEFAULTS: dict[str, Any] = {
    # attribute of args -> value if neither the flags nor the HF config give one
    "rotary_scaling_factor": 1.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.0,
}


@dataclass(frozen=True, slots=True)
class Flag:
    """The value of one model flag according to a config.json."""

    attribute: str
    """Attribute of args."""
    value: Any
    """None means that the flag must not be given."""
    source: str
    """Key and value of config.json, or a clause on the family; ends the message about a flag that differs."""
    is_fact: bool = True
    """False for a default of runs without model flags; other values are valid too."""


FlagRule = Callable[[Config], Iterable[Flag | str]]

DECODER: Mapping[str, Any] = {
    "swiglu": True,
    "add_bias_linear": False,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
}
"""Attributes of every family, unless it overrides them."""
PLAIN: Mapping[str, Any] = {"hidden_act": "silu", "mlp_bias": False, "use_sliding_window": False}
"""Keys of config.json with the only value that layers support, unless their family overrides it."""

_SIZES = {
    # key of config.json -> attribute of args
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
    "rms_norm_eps": "norm_epsilon",
}
_EXPERT_SIZES = {
    "moe_intermediate_size": "moe_ffn_hidden_size",
    "shared_expert_intermediate_size": "moe_shared_expert_intermediate_size",
}
_LATENT_SIZES = {
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_head_dim",
    "qk_rope_head_dim": "qk_pos_emb_head_dim",
    "v_head_dim": "v_head_dim",
}
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Constants of megatron-core's --use-rope-scaling."""
EXPERT_CHOICES: Mapping[str, Any] = {"moe_router_dtype": "fp32", "moe_grouped_gemm": True}
"""Flags of experts for a run without model flags."""
SIGMOID_CHOICES: Mapping[str, Any] = {
    "moe_router_bias_update_rate": 0.0,
    "moe_router_load_balancing_type": "seq_aux_loss",
}
"""Further defaults for sigmoid scores with a bias: values that engines do not get must not change."""


def fact(config: Config, key: str, attribute: str, value: Any = None) -> Flag:
    """Return the flag that a key of config.json determines: the key's value, or ``value`` derived from it."""
    return Flag(attribute, config[key] if value is None else value, f"{key} is {config[key]}")


def facts(config: Config, keys: Mapping[str, str]) -> Iterator[Flag]:
    """Yield a flag for each key (-> attribute) that config.json has."""
    return (fact(config, key, attribute) for key, attribute in keys.items() if config.get(key) is not None)


def choices(values: Mapping[str, Any]) -> Iterator[Flag]:
    """Yield defaults for runs without model flags, to which other runs are not compared."""
    return (Flag(attribute, value, "this family's usual choice", is_fact=False) for attribute, value in values.items())


def shared_rules(config: Config) -> Iterator[Flag | str]:
    """Yield the flags of the keys that all families share; missing keys are skipped."""
    yield from facts(config, _SIZES)
    tied = config.get("tie_word_embeddings")
    if tied is not None:
        yield Flag("untie_embeddings_and_output_weights", not tied, f"tie_word_embeddings is {tied}")
    if config.get("kv_lora_rank") is not None:
        yield from latent_attention(config)
    else:
        yield from grouped_attention(config)
    if config.get("n_routed_experts") is not None:
        yield from sigmoid_experts(config)
    elif config.get("num_experts"):
        yield from softmax_experts(config)
    yield from mlp_width(config)


def mlp_width(config: Config) -> Iterator[Flag]:
    """Yield the width of dense layers; it has no meaning if every layer has experts."""
    key = "intermediate_size" if config.get("intermediate_size") is not None else "moe_intermediate_size"
    if config.get(key) is not None:
        has_dense = not all(layers_with_experts(config) or [0])
        yield Flag("ffn_hidden_size", config[key], f"{key} is {config[key]}", is_fact=has_dense)


def grouped_attention(config: Config) -> Iterator[Flag | str]:
    """Yield heads and rotary positions of attention without latents."""
    yield from facts(config, {"num_key_value_heads": "num_query_groups", "head_dim": "kv_channels"})
    width, heads = config.get("hidden_size"), config.get("num_attention_heads")
    if width and heads and config.get("head_dim") is None:
        yield Flag("kv_channels", width // heads, f"hidden_size / num_attention_heads is {width // heads}")
    if config.get("num_key_value_heads") is not None:
        yield fact(config, "num_key_value_heads", "group_query_attention", True)
    for key, attribute in (("attention_bias", "add_qkv_bias"), ("use_qk_norm", "qk_layernorm")):
        if config.get(key) is not None:
            yield Flag(attribute, bool(config[key]), f"{key} is {config[key]}")
    yield from rotary_positions(config)


def rotary_positions(config: Config) -> Iterator[Flag | str]:
    """Yield base, rotated fraction and scaling of rotary positions: plain, Llama 3's, or YaRN."""
    settings = hf_rope_settings(config)
    kind = settings["rope_type"]
    if settings["rope_theta"] is not None:
        yield fact(settings, "rope_theta", "rotary_base")
    if settings["partial_rotary_factor"] is not None:
        yield fact(settings, "partial_rotary_factor", "rotary_percent")
    if kind == "yarn":
        yield Flag("position_embedding_type", "yarn", "rope_type is yarn")
        yield from yarn_flags(hf_yarn_settings(config, knows_truncate=True))
    elif kind == "llama3":
        yield Flag("use_rope_scaling", True, "rope_type is llama3")
        yield Flag("rope_scaling_factor", settings.get("factor"), f"factor of llama3 is {settings.get('factor')}")
        for name, built_in in _LLAMA3.items():
            if settings.get(name) is None or abs(settings[name] - built_in) > 1e-6 * built_in:
                yield f"--use-rope-scaling has {name} {built_in} built in; the config says {settings.get(name)}"
    elif kind == "default":
        yield Flag("use_rope_scaling", False, "rope_type is default")
        if settings["rope_theta"] is not None:
            yield Flag("position_embedding_type", "rope", "rope_type is default")
    else:
        yield f"--use-rope-scaling knows positions of type llama3 only; rope_type is {kind}"


def yarn_flags(settings: Mapping[str, Any]) -> Iterator[Flag]:
    """Yield YaRN's settings."""
    names = {"rotary_scaling_factor": "factor", "yarn_truncate": "truncate"}
    return (Flag(name, value, f"{names.get(name, name)} is {value}") for name, value in settings.items())


def latent_attention(config: Config) -> Iterator[Flag | str]:
    """Yield multi-latent attention: its sizes, norms and rotary positions."""
    yield fact(config, "kv_lora_rank", "multi_latent_attention", True)
    yield from facts(config, _LATENT_SIZES)
    if "q_lora_rank" in config:
        yield Flag("q_lora_rank", config["q_lora_rank"], f"q_lora_rank is {config['q_lora_rank']}")
    yield Flag("qk_layernorm", True, "the latents of this model are normed")
    yield Flag("kv_channels", config.get("qk_nope_head_dim"), "qk_nope_head_dim", is_fact=False)
    if config.get("rope_interleave") is False:
        yield "--multi-latent-attention turns interleaved pairs of dimensions; rope_interleave is False"
    if config.get("attention_bias"):
        yield "--multi-latent-attention has no biases; attention_bias is True"
    settings = hf_rope_settings(config)
    if settings["partial_rotary_factor"] not in (None, 1.0):
        yield f"--qk-pos-emb-head-dim dimensions turn; partial_rotary_factor is {settings['partial_rotary_factor']}"
    if settings["rope_theta"] is not None:
        yield fact(settings, "rope_theta", "rotary_base")
    yarn = hf_yarn_settings(config)
    if yarn["rotary_scaling_factor"] != 1.0:
        yield Flag("rope_type", "yarn", "rope_type is yarn")
    yield from yarn_flags(yarn)


def layers_with_experts(config: Config) -> list[int] | None:
    """Return 1 for each layer with experts and 0 for each dense layer; None if config.json does not say."""
    count, kinds = config.get("num_hidden_layers"), config.get("mlp_layer_types")
    num_dense, dense = config.get("first_k_dense_replace"), config.get("mlp_only_layers") or ()
    if kinds is not None:
        return [int(kind != "dense") for kind in kinds]
    if count is None:
        return None
    if config.get("n_routed_experts") is not None:
        is_plain = num_dense is not None and config.get("moe_layer_freq", 1) == 1
        return [int(layer >= num_dense) for layer in range(count)] if is_plain else None
    if config.get("num_experts") or config.get("num_local_experts"):
        step = config.get("decoder_sparse_step") or 1
        return [int(layer not in dense and (layer + 1) % step == 0) for layer in range(count)]
    return None


def expert_layers(config: Config) -> Iterator[Flag]:
    """Yield which layers have experts, the experts' width, and how they are computed."""
    yield from facts(config, _EXPERT_SIZES)
    layers = layers_with_experts(config)
    if layers is not None:
        dense = [layer for layer, has_experts in enumerate(layers) if not has_experts]
        yield Flag("moe_layer_freq", layers, f"the dense layers of the model are {dense}")
    yield from choices(EXPERT_CHOICES)


def softmax_experts(config: Config) -> Iterator[Flag | str]:
    """Yield Qwen's experts: chosen by a softmax, with weights that may be normalized to sum to 1."""
    yield from facts(config, {"num_experts": "num_experts", "num_experts_per_tok": "moe_router_topk"})
    yield from expert_layers(config)
    is_normalised = config.get("norm_topk_prob")
    is_softmax = config.get("scoring_func", "softmax") == "softmax"
    if is_normalised is not None and is_softmax and config.get("num_experts_per_tok") != 1:
        clause = "(without the flag, the weights of the chosen experts add up to 1)"
        yield Flag("moe_router_pre_softmax", not is_normalised, f"norm_topk_prob is {is_normalised} {clause}")


def sigmoid_experts(config: Config) -> Iterator[Flag | str]:
    """Yield DeepSeek's experts: sigmoid scores with a bias, groups, shared experts, dense layers first."""
    keys = {
        "n_routed_experts": "num_experts",
        "num_experts_per_tok": "moe_router_topk",
        "routed_scaling_factor": "moe_router_topk_scaling_factor",
        "scoring_func": "moe_router_score_function",
    }
    yield from facts(config, keys)
    yield from expert_layers(config)
    yield from choices(SIGMOID_CHOICES | {"moe_router_pre_softmax": True})
    topk = config.get("num_experts_per_tok")
    if config.get("scoring_func", "sigmoid") == "sigmoid":
        if config.get("norm_topk_prob") is False and topk != 1:
            yield "--moe-router-score-function sigmoid normalises the chosen experts' scores; norm_topk_prob is False"
        if config.get("norm_topk_prob") is True and topk == 1:
            yield "--moe-router-topk is 1, whose score megatron-core does not normalise; norm_topk_prob is True"
    shared = (config.get("n_shared_experts") or 0) * (config.get("moe_intermediate_size") or 0)
    words = f"n_shared_experts * moe_intermediate_size is {shared}"
    yield Flag("moe_shared_expert_intermediate_size", shared or None, words)
    groups, chosen = config.get("n_group") or 1, config.get("topk_group") or 1
    is_grouped = groups > 1
    yield Flag("moe_router_num_groups", groups if is_grouped else None, f"n_group is {groups}")
    yield Flag("moe_router_group_topk", chosen if is_grouped else None, f"topk_group is {chosen}")
    if groups > chosen and topk is not None and topk // chosen != 2:
        yield (
            f"--moe-router-topk is {topk}; megatron-core ranks a group of experts by its best {topk} // {chosen} "
            "(topk_group), the model by its best two"
        )


def hf_rope_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary settings of a config of any transformers version in one dict, always with ``rope_type``.

    transformers 5 has them under ``rope_parameters``; older configs have the base at the top level and the rest, if
    any, under ``rope_scaling``.
    """
    nested = config.get("rope_scaling") or config.get("rope_parameters") or {}
    settings = {"rope_theta": config.get("rope_theta"), **nested}
    settings.setdefault("partial_rotary_factor", config.get("partial_rotary_factor"))
    kind = nested.get("rope_type") or nested.get("type") or "default"
    settings["rope_type"] = str(kind).removeprefix("deepseek_")
    original = config.get("original_max_position_embeddings") or nested.get("original_max_position_embeddings")
    settings["original_max_position_embeddings"] = original or config.get("max_position_embeddings")
    return settings


def hf_yarn_settings(config: Mapping[str, Any], *, knows_truncate: bool = False) -> dict[str, Any]:
    """Return a config's values of :data:`YARN_DEFAULTS`; without YaRN only a factor of 1.

    Args:
        knows_truncate: also return ``yarn_truncate``, which latent attention does not support.

    Raises:
        ConfigError: the positions are stretched in an unsupported way.
    """
    settings = hf_rope_settings(config)
    kind = settings["rope_type"]
    if kind == "default":
        return {"rotary_scaling_factor": 1.0}
    where = "--position-embedding-type yarn" if knows_truncate else "multi-latent attention"
    if kind != "yarn":
        raise ConfigError(
            f"config.json of --hf-checkpoint has rotary positions of type {kind!r}; {where} knows 'default' and "
            "'yarn'."
        )
    truncates = (True, False) if knows_truncate else (True,)
    derived = settings.get("factor") and not settings.get("mscale") and 0.1 * math.log(settings["factor"]) + 1
    if derived and math.isclose(settings.get("attention_factor") or 0, derived, rel_tol=1e-6):
        settings.pop("attention_factor")
    for name, allowed in (("attention_factor", (None,)), ("attn_factor", (1, None)), ("truncate", truncates)):
        if settings.get(name, allowed[0]) not in allowed:
            raise ConfigError(
                f"config.json of --hf-checkpoint gives YaRN the {name} {settings[name]!r}; {where} derives it from "
                "factor, mscale and mscale_all_dim; remove it from the config if it says the same."
            )
    values = {name: settings.get("factor" if name == "rotary_scaling_factor" else name) for name in YARN_DEFAULTS}
    if values["rotary_scaling_factor"] is None:
        longest = config.get("max_position_embeddings")
        if longest is None:
            raise ConfigError(
                "config.json of --hf-checkpoint gives YaRN no factor, and no max_position_embeddings from which it "
                "would follow; add one of them."
            )
        values["rotary_scaling_factor"] = longest / values["original_max_position_embeddings"]
    # As in transformers, a value that is missing or 0 means the default.
    values = {name: value or YARN_DEFAULTS[name] for name, value in values.items()}
    return values | {"yarn_truncate": settings.get("truncate", True)} if knows_truncate else values
