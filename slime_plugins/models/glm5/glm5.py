"""The layers of GLM-5, GLM-5.2 and DeepSeek-V3.2: latent attention to the keys that an indexer selects.

    --spec slime_plugins.models.glm5.glm5 get_glm5_spec

The indexer's sizes and the sharing schedule are read from the config.json of ``--hf-checkpoint``; the flags describe
the rest of the decoder block.
"""

from __future__ import annotations

import logging
from argparse import Namespace
from dataclasses import replace
from typing import Any

from slime.backends.megatron_utils import cpu_platform  # noqa: F401

# isort: split
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import MLATransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from slime.backends.megatron_utils.flags.hf_config_check import read_hf_config
from slime.backends.megatron_utils.layers.layer_specs import BlockSpec, get_block_spec
from slime.backends.megatron_utils.models import family_of
from slime.utils import env
from slime.utils.errors import ConfigError
from slime_plugins.models.glm5.attention import sparse_attention_spec
from slime_plugins.models.glm5.index_sharing import index_sharing
from slime_plugins.models.glm5.indexer import IndexerSettings

logger = logging.getLogger(__name__)


def get_glm5_spec(args: Namespace, config: MLATransformerConfig, vp_stage: int | None = None) -> BlockSpec:
    """Return the layers of this pipeline stage.

    Args:
        args: complete flags; ``hf_checkpoint`` and ``allgather_cp`` are read.
        config: built from ``args``.
        vp_stage: virtual pipeline stage on this rank.

    Raises:
        ConfigError: the flags do not describe latent attention, or context parallelism lacks ``--allgather-cp``.
        PipelineSplitError: a (virtual) pipeline stage would start with a layer that reuses an earlier layer's keys.
    """
    _check(config, has_contiguous_parts=args.allgather_cp)
    hf_config = read_hf_config(args.hf_checkpoint)
    settings = indexer_settings(hf_config)
    sharing = index_sharing(hf_config, config.num_layers)
    sharing.check_stages(first_layers_of_stages(config, vp_stage))

    def sparse(layer: ModuleSpec, number: int) -> ModuleSpec:
        """Replace a layer's self-attention with sparse attention."""
        attention = sparse_attention_spec(
            config, settings, source_layer=sharing.source(number), is_computing=sharing.computes(number)
        )
        return replace(layer, submodules=replace(layer.submodules, self_attention=attention))

    block = get_block_spec(config, vp_stage, sparse)
    if block.mtp_layer is not None:
        block.mtp_layer = sparse(block.mtp_layer, config.num_layers + 1)
    return block


def check_stages(config: MLATransformerConfig, hf_checkpoint: str | None, *_: Any) -> None:
    """Check, before any GPU is used, that every pipeline stage starts with a layer that selects keys.

    Raises:
        PipelineSplitError: a (virtual) stage would start with a layer that reuses an earlier layer's keys.
    """
    if hf_checkpoint:
        virtual = 0 if config.virtual_pipeline_model_parallel_size else None
        sharing = index_sharing(read_hf_config(hf_checkpoint), config.num_layers)
        sharing.check_stages(first_layers_of_stages(config, virtual))


def indexer_settings(hf_config: dict[str, Any]) -> IndexerSettings:
    """Return the sizes of the indexer, and how it pairs rotated dimensions.

    Args:
        hf_config: result of ``read_hf_config``.

    Raises:
        ConfigError: the config's model has no indexer.
    """
    family = family_of(hf_config)
    if family is None or not family.sparse_architecture:
        raise ConfigError(
            f"config.json of --hf-checkpoint has model_type {hf_config.get('model_type')!r}; sparse attention needs a "
            "model with an indexer, glm_moe_dsa or deepseek_v32; use another --spec."
        )
    is_interleaved = bool(hf_config.get("indexer_rope_interleave", False))
    is_neox = env.indexer_rope_is_neox()
    if is_neox is not None and is_neox == is_interleaved:
        logger.info("INDEXER_ROPE_NEOX_STYLE=%d overrides indexer_rope_interleave=%s.", is_neox, is_interleaved)
        is_interleaved = not is_neox
    return IndexerSettings(
        num_heads=int(hf_config["index_n_heads"]),
        head_dim=int(hf_config["index_head_dim"]),
        topk=int(hf_config["index_topk"]),
        is_interleaved=is_interleaved,
    )


def first_layers_of_stages(config: MLATransformerConfig, vp_stage: int | None) -> list[int]:
    """Return the first layer (from 1) of every pipeline stage with layers, including virtual stages, in any order.

    With ``--pipeline-model-parallel-layout`` megatron-core knows only this rank's stage, so only that one is returned.
    """
    if config.pipeline_model_parallel_layout is not None:
        has_layers = get_num_layers_to_build(config, vp_stage=vp_stage) > 0
        return [get_transformer_layer_offset(config, vp_stage=vp_stage) + 1] if has_layers else []
    stages = config.virtual_pipeline_model_parallel_size
    return [
        get_transformer_layer_offset(config, vp_stage=virtual, pp_rank=rank) + 1
        for rank in range(config.pipeline_model_parallel_size)
        for virtual in (range(stages) if stages else (None,))
        if get_num_layers_to_build(config, vp_stage=virtual, pp_rank=rank) > 0
    ]


def _check(config: MLATransformerConfig, *, has_contiguous_parts: bool) -> None:
    if not config.multi_latent_attention or config.q_lora_rank is None:
        raise ConfigError(
            f"--multi-latent-attention is {config.multi_latent_attention} and --q-lora-rank "
            f"{getattr(config, 'q_lora_rank', None)}; sparse attention needs both; source the file of scripts/models "
            "that belongs to the checkpoint."
        )
    if config.context_parallel_size > 1 and not has_contiguous_parts:
        raise ConfigError(
            f"--context-parallel-size is {config.context_parallel_size} without --allgather-cp; sparse attention "
            "gathers contiguous parts of the stream; give --allgather-cp."
        )
