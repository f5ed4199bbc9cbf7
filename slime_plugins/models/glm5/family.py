"""DeepSeek sparse attention: GLM-5, GLM-5.2 and DeepSeek-V3.2, which are DeepSeek-V3 with an indexer.

The indexer's heads rotate their first dimensions in the checkpoint, and their last dimensions here, like Megatron's
heads.  With index sharing, only the layers that select keys have an indexer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from slime.backends.megatron_utils.models.family import BLOCK_FP8, ModelFamily
from slime.backends.megatron_utils.models.rule import Rule
from slime.train_data.model_dims import ModelDims
from slime_plugins.models.glm5.index_sharing import index_sharing
from slime_plugins.models.shared_flags import SIGMOID
from slime_plugins.models.shared_weights import LATENT_MOE, relaid_rule, turning_part_first, turning_part_last

INDEXER = (
    *(
        # One row per dimension of the indexer's heads.
        relaid_rule(f"self_attention.{name}", f"self_attn.indexer.{name}", turning_part_last, turning_part_first)
        for name in ("wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias")
    ),
    Rule("self_attention.weights_proj.weight", ("self_attn.indexer.weights_proj.weight",)),
)

DEEPSEEK_SPARSE = replace(
    LATENT_MOE,
    family="GLM-5, GLM-5.2 and DeepSeek-V3.2",
    layer=(*LATENT_MOE.layer, *INDEXER),
    computed_in_fp32=(".weights_proj.weight",),
    not_applied=(".linear_kv_up_proj.weight",),
    plain_parts=("weights_proj",),  # weights the indexer's heads
)

INDEXER_SIZES = {
    # key of config.json -> attribute of args
    "index_n_heads": "dsa_indexer_n_heads",
    "index_head_dim": "dsa_indexer_head_dim",
    "index_topk": "dsa_indexer_topk",
}
SPARSE_SPEC = "slime_plugins.models.glm5.glm5 get_glm5_spec"


def sparse_dims(dims: ModelDims, hf_config: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the dimensions of sparse attention; empty without a config.json, the only source for its layers."""
    if hf_config is None:
        return {}
    return {
        "attention": "sparse",
        "computes_index": index_sharing(hf_config, dims.num_layers).is_computing,
    }


_INDEX = {"index_n_heads": 32, "index_head_dim": 128, "index_topk": 2048}
_GLM5: dict[str, Any] = {"model_type": "glm_moe_dsa", "architectures": ["GlmMoeDsaForCausalLM"], **_INDEX}
_GLM52: dict[str, Any] = {**_GLM5, "index_topk_freq": 4, "index_skip_topk_offset": 3}

_SPARSE = ModelFamily(
    model_types=("deepseek_v32",),
    weight_map=DEEPSEEK_SPARSE,
    always=SIGMOID,
    sizes=INDEXER_SIZES,
    num_experts_key="n_routed_experts",
    spec=SPARSE_SPEC,
    dims=sparse_dims,
    sparse_architecture="DeepseekV32ForCausalLM",
)
FAMILIES = (
    _SPARSE,
    replace(
        _SPARSE,
        model_types=("glm_moe_dsa",),
        sparse_architecture="GlmMoeDsaForCausalLM",
        published={
            "GLM-5": _GLM5,
            "GLM-5-FP8": {**_GLM5, "quantization_config": BLOCK_FP8},
            "GLM-5.2": _GLM52,
            "GLM-5.2-FP8": {**_GLM52, "quantization_config": BLOCK_FP8},
        },
    ),
)
