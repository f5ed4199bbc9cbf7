"""The layers of OLMo 3: norms only after attention and MLP; windows in three of four layers.

    --spec slime_plugins.models.olmo3 get_olmo3_spec --post-self-attn-layernorm --post-mlp-layernorm --qk-layernorm
    --window-size 4095,0 --window-attn-skip-freq 4

Queries and keys are normalized over all heads together, before they are rotated.  Positions are stretched (YaRN) only
in the layers without a window, as in the original training and in SGLang; transformers 5.12.1 stretches them
everywhere.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from functools import partial

from slime.backends.megatron_utils import cpu_platform  # noqa: F401

# isort: split
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention

from slime.backends.megatron_utils.layers.layer_specs import BlockSpec, get_block_spec
from slime.utils.errors import ConfigError
from slime_plugins.models.gemma3.layers import WindowAttention
from slime_plugins.models.minimax_m2.layers import AllHeadsNorm


def get_olmo3_spec(args: Namespace, config: TransformerConfig, vp_stage: int | None = None) -> BlockSpec:
    """Return the layers of this pipeline stage.

    Args:
        args: the norms after attention and MLP, and the base of the rotary angles.
        config: ``window_size`` and ``window_attn_skip_freq`` say which layers have a window.
        vp_stage: which virtual stage of this rank.

    Raises:
        ConfigError: the flags describe another model.
    """
    has_post_norms = args.post_self_attn_layernorm and args.post_mlp_layernorm
    check_stages(config, args.hf_checkpoint, has_post_norms)
    change = partial(_olmo3_layer, config, args.rotary_base)
    return get_block_spec(config, vp_stage, change, post_self_attn_layernorm=True, post_mlp_layernorm=True)


def check_stages(config: TransformerConfig, hf_checkpoint: str | None, has_post_norms: bool) -> None:
    """Check that the flags describe this model, before any GPU is used.

    Raises:
        ConfigError: they do not.
    """
    has_norms = config.qk_layernorm and has_post_norms
    if config.window_size is None or not has_norms:
        raise ConfigError(
            "--window-size, --qk-layernorm, --post-self-attn-layernorm or --post-mlp-layernorm is not given; OLMo 3 "
            "has all four; source scripts/models/olmo3-7B.sh."
        )


def _olmo3_layer(config: TransformerConfig, rotary_base: float, layer: ModuleSpec, number: int) -> ModuleSpec:
    """Return layer ``number``, from 1, with the norms of OLMo 3."""
    attention = layer.submodules.self_attention
    norms = {
        "q_layernorm": ModuleSpec(module=AllHeadsNorm, params={"num_heads": config.num_attention_heads}),
        "k_layernorm": ModuleSpec(module=AllHeadsNorm, params={"num_heads": config.num_query_groups}),
    }
    attention = replace(attention, submodules=replace(attention.submodules, **norms))
    if is_layer_window_attention(config.window_size, config.window_attn_skip_freq, number):
        params = {**attention.params, "rotary_base": rotary_base}
        attention = replace(attention, module=WindowAttention, params=params)
    submodules = replace(
        layer.submodules, input_layernorm=IdentityOp, pre_mlp_layernorm=IdentityOp, self_attention=attention
    )
    return replace(layer, submodules=submodules)
