"""Flags of multi-latent attention and of the router that goes with it, against the HF config.

What YaRN needs and the flags do not say comes from the checkpoint's config: Megatron's own defaults (a factor of 40)
would silently bend the positions of a model that was never stretched.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from slime.backends.megatron_utils.flags.config_flags import flag_of
from slime.backends.megatron_utils.models.family import differs
from slime.utils.errors import ConfigError

YARN_DEFAULTS: dict[str, Any] = {
    # attribute of args -> value where neither the flags nor the HF config say anything
    "rotary_scaling_factor": 1.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.0,
}
_HF_NAMES = {"rotary_scaling_factor": "factor"}
_PLAIN_ROPE = (None, "default")
_SIZES = {
    # key of config.json -> attribute of args
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_head_dim",
    "qk_rope_head_dim": "qk_pos_emb_head_dim",
    "v_head_dim": "v_head_dim",
}
_ROUTER_SIZES = {
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "moe_router_topk",
    "routed_scaling_factor": "moe_router_topk_scaling_factor",
}


def hf_rope_settings(config: dict[str, Any]) -> dict[str, Any]:
    """Return the rotary settings of a config of any age in one dictionary, ``rope_type`` always among them.

    transformers 5 has them under ``rope_parameters``; older configs have a base at the top and the rest, if there is
    any, under ``rope_scaling``.
    """
    nested = config.get("rope_scaling") or config.get("rope_parameters") or {}
    settings = {"rope_theta": config.get("rope_theta"), **nested}
    settings.setdefault("partial_rotary_factor", config.get("partial_rotary_factor"))
    settings["rope_type"] = nested.get("rope_type") or nested.get("type") or "default"
    original = config.get("original_max_position_embeddings") or nested.get("original_max_position_embeddings")
    settings["original_max_position_embeddings"] = original or config.get("max_position_embeddings")
    return settings


def hf_yarn_settings(config: dict[str, Any]) -> dict[str, Any]:
    """Return the values of :data:`YARN_DEFAULTS` that a config asks for; a factor of 1 alone where it has no YaRN.

    Raises:
        ConfigError: its positions are stretched in a way that latent attention here does not know.
    """
    settings = hf_rope_settings(config)
    kind = settings["rope_type"]
    if kind in _PLAIN_ROPE:
        return {"rotary_scaling_factor": 1.0}
    if kind not in ("yarn", "deepseek_yarn"):
        raise ConfigError(
            f"config.json of --hf-checkpoint has rotary positions of type {kind!r}; multi-latent attention knows "
            "'default' and 'yarn'."
        )
    for name, allowed in (("attention_factor", None), ("truncate", True)):
        if settings.get(name, allowed) != allowed:
            raise ConfigError(
                f"config.json of --hf-checkpoint gives YaRN the {name} {settings[name]!r}; multi-latent attention "
                "derives it from factor, mscale and mscale_all_dim; remove it from the config if it says the same."
            )
    values = {name: settings.get(_HF_NAMES.get(name, name)) for name in YARN_DEFAULTS}
    if values["rotary_scaling_factor"] is None:
        values["rotary_scaling_factor"] = (
            config["max_position_embeddings"] / values["original_max_position_embeddings"]
        )
    # As transformers reads them: a beta that is absent or 0 is the usual one.
    return {name: value or YARN_DEFAULTS[name] for name, value in values.items()}


def derive_rope(args: Namespace, config: dict[str, Any] | None) -> dict[str, Any]:
    """Return the rotary flags that were not given.

    Args:
        args: flags; None where one was not given.
        config: of the HF checkpoint, when there is one.

    Raises:
        ConfigError: YaRN's flags without ``--multi-latent-attention``, or a config with unknown rotary positions.
    """
    given = {name: vars(args)[name] for name in YARN_DEFAULTS if vars(args)[name] is not None}
    if not args.multi_latent_attention:
        if given:
            name = next(iter(given))
            raise ConfigError(
                f"{flag_of(name)} is {given[name]} without --multi-latent-attention, where it has no effect; "
                "--use-rope-scaling stretches the positions of other models."
            )
        return {"rope_type": args.rope_type or "rope"}
    from_config = hf_yarn_settings(config) if config else {}
    values = {**YARN_DEFAULTS, **from_config, **given}
    kind = args.rope_type or ("yarn" if values["rotary_scaling_factor"] != 1.0 else "rope")
    return {**values, "rope_type": kind}


def latent_mismatches(args: Namespace, config: dict[str, Any]) -> Iterator[str]:
    """Yield one line for each flag of latent attention that differs from the HF config."""
    has_latents = config.get("kv_lora_rank") is not None
    if has_latents and not args.multi_latent_attention:
        yield f"--multi-latent-attention is not given; kv_lora_rank is {config['kv_lora_rank']}"
    if not (has_latents and args.multi_latent_attention):
        return
    for key, attribute in _SIZES.items():
        yield from _difference(key, config.get(key), attribute, vars(args)[attribute])
    if "q_lora_rank" in config and config["q_lora_rank"] != args.q_lora_rank:
        yield f"--q-lora-rank is {args.q_lora_rank}; q_lora_rank is {config['q_lora_rank']}"
    if not args.qk_layernorm:
        yield "--qk-layernorm is not given; the latents of this model are normed"
    if config.get("rope_interleave") is False:
        yield "--multi-latent-attention turns interleaved pairs of dimensions; rope_interleave is False"
    if config.get("attention_bias"):
        yield "--multi-latent-attention has no biases; attention_bias is True"
    partial = hf_rope_settings(config)["partial_rotary_factor"]
    if partial is not None and differs(partial, 1.0):
        yield f"--qk-pos-emb-head-dim dimensions turn; partial_rotary_factor is {partial}"
    yarn = hf_yarn_settings(config)
    if differs(yarn["rotary_scaling_factor"], 1.0) and args.rope_type != "yarn":
        yield f"--rope-type is {args.rope_type}; rope_type is yarn"
    for attribute, value in yarn.items():
        yield from _difference(_HF_NAMES.get(attribute, attribute), value, attribute, vars(args)[attribute])


def sigmoid_router_mismatches(args: Namespace, config: dict[str, Any]) -> Iterator[str]:
    """Yield one line for each flag of DeepSeek's router (sigmoid scores, a bias, groups) that differs."""
    if not args.num_experts or config.get("n_routed_experts") is None:
        return
    for key, attribute in _ROUTER_SIZES.items():
        default = 1.0 if attribute == "moe_router_topk_scaling_factor" else None
        yield from _difference(key, config.get(key), attribute, vars(args)[attribute] or default)
    if config.get("scoring_func") not in (None, args.moe_router_score_function):
        function = config["scoring_func"]
        yield f"--moe-router-score-function is {args.moe_router_score_function}; scoring_func is {function}"
    if args.moe_router_score_function != "sigmoid":
        return
    topk = args.moe_router_topk
    if config.get("norm_topk_prob") is False and topk > 1:
        yield "--moe-router-score-function sigmoid normalises the chosen experts' scores; norm_topk_prob is False"
    if config.get("norm_topk_prob") is True and topk == 1:
        yield "--moe-router-topk is 1, whose score megatron-core does not normalise; norm_topk_prob is True"
    shared = (config.get("n_shared_experts") or 0) * (config.get("moe_intermediate_size") or 0)
    yield from _difference(
        "n_shared_experts * moe_intermediate_size",
        shared,
        "moe_shared_expert_intermediate_size",
        args.moe_shared_expert_intermediate_size or 0,
    )
    yield from _group_mismatches(args, config)
    yield from _dense_layer_mismatches(args, config)


def _group_mismatches(args: Namespace, config: dict[str, Any]) -> Iterator[str]:
    """Yield one line for each flag of groups of experts that differs."""
    groups, chosen = config.get("n_group") or 1, config.get("topk_group") or 1
    yield from _difference("n_group", groups, "moe_router_num_groups", args.moe_router_num_groups or 1)
    yield from _difference("topk_group", chosen, "moe_router_group_topk", args.moe_router_group_topk or 1)
    if groups > chosen and args.moe_router_topk // chosen != 2:
        yield (
            f"--moe-router-topk is {args.moe_router_topk}; megatron-core ranks a group of experts by its best "
            f"{args.moe_router_topk} // {chosen} (topk_group), the model by its best two"
        )


def _dense_layer_mismatches(args: Namespace, config: dict[str, Any]) -> Iterator[str]:
    """Yield one line when other layers have experts."""
    num_dense, kinds = config.get("first_k_dense_replace"), config.get("mlp_layer_types")
    if kinds is not None:
        expected = [int(kind != "dense") for kind in kinds]
    elif num_dense is not None and config.get("moe_layer_freq", 1) == 1:
        expected = [int(index >= num_dense) for index in range(args.num_layers)]
    else:
        return
    frequency = args.moe_layer_freq
    actual = [int(i % frequency == 0) for i in range(args.num_layers)] if isinstance(frequency, int) else frequency
    if list(actual) != expected:
        dense = [index for index, has_experts in enumerate(expected) if not has_experts]
        yield f"--moe-layer-freq is {frequency}; the dense layers of the model are {dense}"


def _difference(key: str, expected: Any, attribute: str, actual: Any) -> Iterator[str]:
    if expected is not None and actual is not None and differs(expected, actual):
        yield f"{flag_of(attribute)} is {actual}; {key} is {expected}"
