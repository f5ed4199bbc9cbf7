"""GLM-4 and GLM-Z1 (9B, 32B): norms on both sides of attention and MLP.

    --spec slime_plugins.models.glm4 get_glm_spec --post-self-attn-layernorm --post-mlp-layernorm

The two flags are honoured without ``--spec`` too; the path is there for commands that name it.
"""

from __future__ import annotations

from argparse import Namespace

from slime.backends.megatron_utils import cpu_platform  # noqa: F401

# isort: split
from megatron.core.transformer.transformer_config import TransformerConfig

from slime.backends.megatron_utils.layers.layer_specs import BlockSpec, get_block_spec


def get_glm_spec(args: Namespace, config: TransformerConfig, vp_stage: int | None = None) -> BlockSpec:
    """Return the layers of this pipeline stage."""
    return get_block_spec(
        config,
        vp_stage,
        post_self_attn_layernorm=args.post_self_attn_layernorm,
        post_mlp_layernorm=args.post_mlp_layernorm,
    )
