"""GLM-5, GLM-5.2 and DeepSeek-V3.2: DeepSeek-V3's layout and the indexer of sparse attention.

The indexer's heads turn in their first dimensions in the checkpoint, and in their last ones here, as those of Megatron
do.  With index sharing only the layers that choose keys have an indexer.
"""

from __future__ import annotations

from dataclasses import replace

from slime.backends.megatron_utils.weight_maps.deepseek import DEEPSEEK
from slime.backends.megatron_utils.weight_maps.rule import Rule
from slime.backends.megatron_utils.weight_maps.weight_layouts import turning_part_first, turning_part_last


def _turning_rule(name: str) -> Rule:
    """A parameter with one row per dimension of the indexer's heads."""
    return Rule(
        f"self_attention.{name}",
        (f"self_attn.indexer.{name}",),
        merge=lambda tensors, shape: turning_part_last(tensors[0], shape),
        split=lambda tensor, shape: (turning_part_first(tensor, shape),),
    )


INDEXER = (
    *(_turning_rule(name) for name in ("wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias")),
    Rule("self_attention.weights_proj.weight", ("self_attn.indexer.weights_proj.weight",)),
)

DEEPSEEK_SPARSE = replace(DEEPSEEK, family="GLM-5, GLM-5.2 and DeepSeek-V3.2", layer=(*DEEPSEEK.layer, *INDEXER))
