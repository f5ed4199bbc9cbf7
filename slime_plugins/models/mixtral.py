"""Mixtral: Mistral's attention, and experts in every layer, with names that others also use (MiniMax-M2)."""

from __future__ import annotations

from collections.abc import Iterator

from slime.backends.megatron_utils.models.family import ModelFamily
from slime.backends.megatron_utils.models.flag_rules import Config, Flag, expert_layers
from slime.backends.megatron_utils.models.rule import WeightMap
from slime_plugins.models.shared_flags import LOCAL_EXPERT_SIZES, NO_BIASES, SOFTMAX, window_is_idle
from slime_plugins.models.shared_weights import ATTENTION, BLOCK_SPARSE_EXPERTS, NORMS, TOP


def mixtral_flags(config: Config) -> Iterator[Flag | str]:
    """Yield the experts, and messages for settings in config.json that SGLang ignores."""
    yield from window_is_idle(config)
    width, heads, hidden = (config.get(key) for key in ("head_dim", "num_attention_heads", "hidden_size"))
    if width and heads and hidden and width * heads != hidden:
        yield f"head_dim is {width} of {heads} heads; SGLang has hidden_size / num_attention_heads: {hidden // heads}"
    yield from expert_layers(config)
    yield Flag("moe_router_pre_softmax", False, "the weights of the chosen experts add up to 1")


FAMILIES = (
    ModelFamily(
        model_types=("mixtral",),
        weight_map=WeightMap(family="Mixtral", top=TOP, layer=(*NORMS, *ATTENTION, *BLOCK_SPARSE_EXPERTS)),
        always=SOFTMAX,
        fixed=NO_BIASES,
        sizes=LOCAL_EXPERT_SIZES,
        num_experts_key="num_local_experts",
        flags=mixtral_flags,
    ),
)
