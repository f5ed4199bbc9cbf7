"""Values and rules of model flags that some families share, in addition to those shared by all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from slime.backends.megatron_utils.models.flag_rules import PLAIN, Config, Flag

NO_BIASES: Mapping[str, Any] = {**PLAIN, "attention_bias": False}
SOFTMAX: Mapping[str, Any] = {"moe_router_score_function": "softmax"}
SIGMOID: Mapping[str, Any] = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
"""Attributes of families whose experts are chosen by sigmoid scores with a bias."""
LOCAL_EXPERT_SIZES: Mapping[str, str] = {
    "num_local_experts": "num_experts",
    "num_experts_per_tok": "moe_router_topk",
    "intermediate_size": "moe_ffn_hidden_size",
}
"""Key of config.json -> attribute of args, for families whose ``intermediate_size`` is the width of an expert."""


def window_is_idle(config: Config) -> Iterator[str]:
    """Yield a message for a window shorter than the longest sequence, which engines of these families do not apply."""
    width, longest = config.get("sliding_window"), config.get("max_position_embeddings")
    if width and (longest is None or width < longest):
        yield f"sliding_window is {width} of max_position_embeddings {longest}; attention is not cut to windows here"


def windows(config: Config, every: int) -> Iterator[Flag | str]:
    """Yield the attention window of all but every ``every``-th layer; ``layer_types`` takes precedence."""
    width, types = config.get("sliding_window"), config.get("layer_types") or []
    if "full_attention" in types:
        every = types.index("full_attention") + 1
    if any((kind == "full_attention") != ((layer + 1) % every == 0) for layer, kind in enumerate(types)):
        yield f"layer_types has full attention in other layers than each {every}th; --window-attn-skip-freq cannot"
    if width:
        yield Flag("window_size", (width - 1, 0), f"sliding_window is {width}: {width - 1},0")
        yield Flag("window_attn_skip_freq", every, f"each {every}th layer has full attention")
