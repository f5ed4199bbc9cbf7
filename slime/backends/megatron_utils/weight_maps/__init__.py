"""Which table of weights serves which model; one file per family.

To add a family: write its :class:`~.rule.WeightMap` in a file here, name its ``model_type`` in :data:`MAPS`, and prove
it with a case in ``tests/matrix/families``.
"""

from __future__ import annotations

import re

from slime.backends.megatron_utils.weight_maps.deepseek import DEEPSEEK
from slime.backends.megatron_utils.weight_maps.deepseek_sparse import DEEPSEEK_SPARSE
from slime.backends.megatron_utils.weight_maps.dense import DENSE
from slime.backends.megatron_utils.weight_maps.glm4 import GLM4
from slime.backends.megatron_utils.weight_maps.glm4_moe import GLM4_MOE
from slime.backends.megatron_utils.weight_maps.mimo import MIMO
from slime.backends.megatron_utils.weight_maps.minimax_m2 import MINIMAX_M2
from slime.backends.megatron_utils.weight_maps.qwen3_next import QWEN3_NEXT
from slime.backends.megatron_utils.weight_maps.qwen_moe import QWEN_MOE
from slime.backends.megatron_utils.weight_maps.rule import WeightMap
from slime.utils.errors import ConfigError

MAPS: dict[str, WeightMap] = {
    # model_type of config.json
    "llama": DENSE,
    "qwen2": DENSE,
    "qwen3": DENSE,
    "mimo": MIMO,
    "glm4": GLM4,
    "qwen2_moe": QWEN_MOE,
    "qwen3_moe": QWEN_MOE,
    "qwen3_next": QWEN3_NEXT,
    "glm4_moe": GLM4_MOE,
    "deepseek_v3": DEEPSEEK,
    "kimi_k2": DEEPSEEK,
    "glm4_moe_lite": DEEPSEEK,
    "deepseek_v32": DEEPSEEK_SPARSE,
    "glm_moe_dsa": DEEPSEEK_SPARSE,
    "minimax_m2": MINIMAX_M2,
}


def find_weight_map(model_name: str) -> WeightMap:
    """The table of a model type, an architecture or a config class, in any spelling: ``qwen3``, ``Qwen3Config``.

    Raises:
        ConfigError: there is none; the message lists those there are.
    """
    key = re.sub(r"[-_]", "", model_name).lower()
    key = key.removesuffix("config").removesuffix("forcausallm")
    known = {model_type.replace("_", ""): weight_map for model_type, weight_map in MAPS.items()}
    if key not in known:
        raise ConfigError(
            f"The model type (--model-name, or config.json of --hf-checkpoint) is {model_name!r}; weights can be "
            f"converted for {', '.join(sorted(MAPS))}. docs/models.md says how to add a family."
        )
    return known[key]
