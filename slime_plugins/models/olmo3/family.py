"""OLMo 3 (7B, 32B): norms only after attention and MLP, windows in three of four layers, YaRN in the others."""

from __future__ import annotations

from collections.abc import Iterator

from slime.backends.megatron_utils.models.family import ModelFamily
from slime.backends.megatron_utils.models.flag_rules import Config, Flag
from slime.backends.megatron_utils.models.rule import Rule, WeightMap
from slime_plugins.models.shared_flags import NO_BIASES, windows
from slime_plugins.models.shared_weights import ATTENTION, MLP, TOP

OLMO3 = WeightMap(
    family="OLMo 3",
    top=TOP,
    layer=(
        Rule("post_self_attn_layernorm.weight", ("post_attention_layernorm.weight",)),
        Rule("post_mlp_layernorm.weight", ("post_feedforward_layernorm.weight",)),
        *ATTENTION,
        *MLP,
    ),
)


def olmo3_flags(config: Config) -> Iterator[Flag | str]:
    """Yield the windows, which are required: YaRN applies only to the layers without one."""
    if not config.get("sliding_window"):
        yield "sliding_window is missing; three of four layers of OLMo 3 have a window"
    yield from windows(config, 4)


_PUBLISHED = {
    "model_type": "olmo3",
    "sliding_window": 4096,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "attention_factor": 1.2079441541679836,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    },
}

FAMILIES = (
    ModelFamily(
        model_types=("olmo3",),
        weight_map=OLMO3,
        spec="slime_plugins.models.olmo3 get_olmo3_spec",
        dims=lambda dims, config: {"norms_all_heads": True, "post_norms": 0},
        always=dict.fromkeys(("post_self_attn_layernorm", "post_mlp_layernorm", "qk_layernorm"), True),
        fixed=NO_BIASES,
        flags=olmo3_flags,
        published={
            f"Olmo-3-{kind}": _PUBLISHED for kind in ("1025-7B", "7B-Instruct", "7B-Think", "1125-32B", "32B-Think")
        },
    ),
)
