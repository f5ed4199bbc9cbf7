"""Gemma 4 (E2B, E4B, 31B, 26B-A4B), text model.

It has Gemma 3's norms and sliding windows.  The full-attention layers have wider heads, whose values may be the keys.
The small models add per-layer embeddings, and their last layers attend to the keys and values of earlier layers.
26B-A4B has experts beside each MLP, which acts as the shared expert.

Published checkpoints also hold vision and audio towers, which only the engines load, and stack the experts of a layer
in one tensor (``slime.weights.stacked_experts``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from slime.backends.megatron_utils.models.family import ModelFamily
from slime.backends.megatron_utils.models.flag_rules import Config, Flag, facts
from slime.backends.megatron_utils.models.rule import Rule, WeightMap
from slime.train_data.model_dims import ModelDims
from slime_plugins.models.gemma3.family import FOUR_NORMS, LOCAL_ROTARY_BASE
from slime_plugins.models.shared_flags import windows
from slime_plugins.models.shared_weights import ATTENTION, COMPOSITE, MLP, gate_up_rule

_MODEL = "model.language_model."
_EXPERTS = (
    Rule("mlp.router.weight", ("router.proj.weight",)),
    Rule("mlp.router.scale", ("router.scale",)),
    Rule("mlp.router.per_expert_scale", ("router.per_expert_scale",)),
    Rule("mlp.pre_shared_layernorm.weight", ("pre_feedforward_layernorm.weight",)),
    Rule("mlp.post_shared_layernorm.weight", ("post_feedforward_layernorm_1.weight",)),
    Rule("mlp.pre_experts_layernorm.weight", ("pre_feedforward_layernorm_2.weight",)),
    Rule("mlp.post_experts_layernorm.weight", ("post_feedforward_layernorm_2.weight",)),
    *(replace(rule, megatron=rule.megatron.replace("mlp.", "mlp.shared_experts.")) for rule in MLP),
    gate_up_rule(
        "mlp.experts.linear_fc1.weight{expert}",
        "experts.{expert}.gate_proj.weight",
        "experts.{expert}.up_proj.weight",
    ),
    Rule("mlp.experts.linear_fc2.weight{expert}", ("experts.{expert}.down_proj.weight",)),
)
GEMMA4 = WeightMap(
    family="Gemma 4",
    top=(
        *COMPOSITE["top"],
        Rule("per_layer_inputs.embedding.weight", (f"{_MODEL}embed_tokens_per_layer.weight",)),
        Rule("per_layer_inputs.projection.weight", (f"{_MODEL}per_layer_model_projection.weight",)),
        Rule("per_layer_inputs.norm.weight", (f"{_MODEL}per_layer_projection_norm.weight",)),
    ),
    layer=(
        *FOUR_NORMS,
        # Separate rules for q, k and v: layers differ in heads, and some have no keys or values.
        *(Rule(f"self_attention.linear_{x}.weight", (f"self_attn.{x}_proj.weight",)) for x in "qkv"),
        *ATTENTION[2:],
        *MLP,
        *_EXPERTS,
        *(
            Rule(name, (name,))
            for name in (
                *("layer_scalar", "per_layer_input_gate.weight", "per_layer_projection.weight"),
                "post_per_layer_input_norm.weight",
            )
        ),
    ),
    layer_prefix=COMPOSITE["layer_prefix"],
    untrained=(r"model\.(vision_tower|embed_vision|audio_tower|embed_audio)\..+",),
    # Published checkpoints also have these in layers that share the keys and values of others, where they are unused.
    spare=(r"model\.language_model\.layers\.\d+\.self_attn\.(k_proj|v_proj|k_norm)\..+",),
    plain_parts=("per_layer_",),  # per-layer embeddings; small
)


@dataclass(frozen=True)
class Gemma4Layers:
    """The per-layer settings of config.json; layers are numbered from 1."""

    kinds: tuple[str, ...]
    """``sliding_attention`` or ``full_attention``."""
    num_sharing: int
    """Number of last layers that reuse the keys and values of earlier ones."""
    window_heads: tuple[int, int]
    """Number of key heads and their width in sliding-window layers."""
    full_heads: tuple[int, int]
    """The same in full-attention layers."""
    full_has_values: bool
    full_rotary_base: float
    full_turning: float
    """Fraction of a head that is rotated in full-attention layers."""
    widens_mlp: bool
    """True if the MLPs of layers without keys are twice as wide."""

    @classmethod
    def of(cls, config: Config) -> Gemma4Layers:
        """Read the settings from the text part of config.json."""
        full = config["rope_parameters"]["full_attention"]
        keys_are_values = bool(config["attention_k_eq_v"])
        full_groups = (keys_are_values and config["num_global_key_value_heads"]) or config["num_key_value_heads"]
        return cls(
            kinds=tuple(config["layer_types"]),
            num_sharing=config["num_kv_shared_layers"],
            window_heads=(config["num_key_value_heads"], config["head_dim"]),
            full_heads=(full_groups, config["global_head_dim"] or config["head_dim"]),
            full_has_values=not keys_are_values,
            full_rotary_base=full["rope_theta"],
            full_turning=full.get("partial_rotary_factor") or 1.0,
            widens_mlp=bool(config["use_double_wide_mlp"]),
        )

    def has_window(self, layer: int) -> bool:
        return self.kinds[layer - 1] != "full_attention"

    def heads(self, layer: int) -> tuple[int, int]:
        """Return the number of key heads of a layer, and their width."""
        return self.window_heads if self.has_window(layer) else self.full_heads

    def has_values(self, layer: int) -> bool:
        """Return True if a layer has a value projection."""
        return self.source(layer) == layer and (self.has_window(layer) or self.full_has_values)

    def source(self, layer: int) -> int:
        """Return the layer whose keys and values a layer uses: itself, or the last of its kind that has its own."""
        first = len(self.kinds) - self.num_sharing + 1
        if layer < first:
            return layer
        return max(other for other in range(1, first) if self.kinds[other - 1] == self.kinds[layer - 1])

    def mlp_factor(self, layer: int) -> int:
        """Return the width of a layer's MLP as a multiple of ``intermediate_size``."""
        return 2 if self.widens_mlp and self.source(layer) != layer else 1


_CHOSEN = {"moe_router_score_function": "softmax", "moe_router_pre_softmax": False}


def gemma4_flags(config: Config) -> Iterator[Flag | str]:
    """Yield flags for windows, rotary base and attention scale; refuse settings that the layers do not support."""
    yield from windows(config, 6)
    yield Flag("softmax_scale", 1.0, "queries and keys are normed, so their products are not scaled")
    rotary = config.get("rope_parameters") or {}
    local, full = rotary.get("sliding_attention") or {}, rotary.get("full_attention") or {}
    if local.get("rope_theta", LOCAL_ROTARY_BASE) != LOCAL_ROTARY_BASE or local.get("rope_type") not in (
        None,
        "default",
    ):
        yield f"sliding_attention has {local}; its layers support only default RoPE of base {LOCAL_ROTARY_BASE:g}"
    if full.get("rope_type") not in (None, "default", "proportional") or full.get("factor") not in (None, 1.0):
        yield f"full_attention has {full}; its layers support only default or proportional RoPE"
    if full.get("rope_theta") is not None:
        yield Flag("rotary_base", full["rope_theta"], f"rope_theta of full_attention is {full['rope_theta']}")
    if config.get("use_bidirectional_attention") == "all":
        yield "use_bidirectional_attention is all; only causal attention is supported"
    per_layer, rows = config.get("hidden_size_per_layer_input"), config.get("vocab_size_per_layer_input")
    if per_layer and rows != config.get("vocab_size"):
        yield f"vocab_size_per_layer_input is {rows}, vocab_size is {config.get('vocab_size')}; they must be equal"
    yield from _expert_flags(config)


def _expert_flags(config: Config) -> Iterator[Flag | str]:
    """Yield flags for the MLP as shared expert, and for the routing of the other experts."""
    has_experts, num_experts = config.get("enable_moe_block"), config.get("num_experts")
    if bool(has_experts) != bool(num_experts):
        yield f"enable_moe_block is {has_experts}, but num_experts is {num_experts}; set both or neither"
    elif has_experts:
        yield from facts(config, {"intermediate_size": "moe_shared_expert_intermediate_size"})
        yield from (Flag(name, value, "experts are chosen by a softmax") for name, value in _CHOSEN.items())
        if config.get("use_double_wide_mlp"):
            yield "use_double_wide_mlp is True; a model with experts supports only MLPs of equal width"


def gemma4_dims(dims: ModelDims, config: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return heads and widths layer by layer; an empty dict if there is no config.json."""
    if not config or not config.get("layer_types"):
        return {}
    layers, per_layer = Gemma4Layers.of(config), config["hidden_size_per_layer_input"] or 0
    has_experts = bool(config["enable_moe_block"])
    fields = []
    for layer in range(1, len(layers.kinds) + 1):
        groups, width = layers.heads(layer)
        has_keys = layers.source(layer) == layer
        # The layer scalar; minus the key norm if there are no keys; plus a column of the per-layer embedding table,
        # three projections and a norm.
        own = 1 - width * (not has_keys) + per_layer * (dims.vocab_size + 3 * dims.hidden_size)
        own += dims.hidden_size * bool(per_layer)
        # Three more norms, the router's input scale, and one factor per expert.
        own += (4 * dims.hidden_size + (dims.num_experts or 0)) * has_experts
        values = {
            **{"num_query_groups": groups, "head_dim": width, "own_parameters": own},
            "key_projections": has_keys + layers.has_values(layer),
            "ffn_hidden_size": dims.ffn_hidden_size * layers.mlp_factor(layer),
        }
        fields.append(tuple(values.items()))
    # With experts, the inputs of the two norms after them and of the router are also kept.
    kept = 6 * per_layer + dims.hidden_size * (2 * bool(per_layer) + 3 * has_experts)
    return {"layer_fields": tuple(fields), "own_activations": kept}


def _published(num_layers: int, every: int, window: int, heads: int, **sizes: Any) -> dict[str, Any]:
    """Return the text config of a published checkpoint beyond the model flags; ``sizes`` override the usual values."""
    return {
        "model_type": "gemma4",
        "sliding_window": window,
        "layer_types": [("sliding_attention", "full_attention")[n % every == 0] for n in range(1, num_layers + 1)],
        "num_key_value_heads": heads,
        **{"head_dim": 256, "global_head_dim": 512, "num_global_key_value_heads": None, "attention_k_eq_v": False},
        **{"num_kv_shared_layers": 0, "use_double_wide_mlp": False, "hidden_size_per_layer_input": 0},
        **{"vocab_size_per_layer_input": 262144, "final_logit_softcapping": 30.0, "enable_moe_block": False},
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": LOCAL_ROTARY_BASE},
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
        },
        "vision_config": {"model_type": "gemma4_vision"},
        **sizes,
    }


_SMALL = {"hidden_size_per_layer_input": 256}
_PUBLISHED = {
    "E2B": _published(35, 5, 512, 1, num_kv_shared_layers=20, use_double_wide_mlp=True, **_SMALL),
    "E4B": _published(42, 6, 512, 2, num_kv_shared_layers=18, **_SMALL),
    "31B": _published(60, 6, 1024, 16, num_global_key_value_heads=4, attention_k_eq_v=True),
    "26B-A4B": _published(
        *(30, 6, 1024, 8),
        **{"num_global_key_value_heads": 2, "attention_k_eq_v": True, "enable_moe_block": True, "num_experts": 128},
    ),
}

FAMILIES = (
    ModelFamily(
        model_types=("gemma4",),
        weight_map=GEMMA4,
        spec="slime_plugins.models.gemma4 get_gemma4_spec",
        always=dict.fromkeys(("post_self_attn_layernorm", "post_mlp_layernorm", "qk_layernorm"), True),
        fixed={"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False},
        sizes={"top_k_experts": "moe_router_topk"},
        dims=gemma4_dims,
        flags=gemma4_flags,
        engine_dtype="bfloat16",
        engine_keys={"vision_config": "it fails"},
        # SGLang's adapters have one head width for all layers, and do not cover experts.
        engine_without_adapters=tuple(f"{part}_proj" for part in ("q", "k", "v", "o", "gate", "up", "down")),
        engine_hides_experts=True,
        published={f"gemma-4-{size}{kind}": keys for size, keys in _PUBLISHED.items() for kind in ("", "-it")},
    ),
)
