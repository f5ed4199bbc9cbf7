"""The layers of a GPT model, built from megatron-core's modules with our norm and our packed attention.

megatron-core's ready-made specs need TransformerEngine for packed sequences and for norms under sequence parallelism.
The names on disk are TransformerEngine's all the same (a fused ``linear_qkv.layer_norm_weight``), so that checkpoints
are exchanged with a Megatron that has it.
"""

from __future__ import annotations

from dataclasses import dataclass

from slime.backends.megatron_utils import cpu_platform, wheel_fixes  # noqa: F401

# isort: split
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)

from slime.backends.megatron_utils.layers.attention import PackedAttention
from slime.backends.megatron_utils.layers.latent_attention import latent_attention_spec
from slime.backends.megatron_utils.layers.mlp_specs import mlp_spec
from slime.backends.megatron_utils.layers.norm import Norm
from slime.backends.megatron_utils.layers.routed_layer import RoutedLayer
from slime.backends.megatron_utils.layers.sandwich_layer import SandwichLayer, SandwichLayerSubmodules
from slime.backends.megatron_utils.layers.self_attention import PackedSelfAttention
from slime.utils.errors import ConfigError


def moe_layer_pattern(config: TransformerConfig) -> list[bool]:
    """For each layer of the whole model, whether it has experts.

    Raises:
        ConfigError: the pattern of ``--moe-layer-freq`` is not as long as the model.
    """
    if config.num_moe_experts is None:
        return [False] * config.num_layers
    frequency = config.moe_layer_freq
    if isinstance(frequency, int):
        return [index % frequency == 0 for index in range(config.num_layers)]
    if len(frequency) != config.num_layers:
        raise ConfigError(
            f"--moe-layer-freq has {len(frequency)} entries; --num-layers is {config.num_layers}; give one per layer."
        )
    return [bool(entry) for entry in frequency]


@dataclass
class BlockSpec(TransformerBlockSubmodules):
    """The layers of a pipeline stage, the final norm, and what the layer inside of an MTP layer is."""

    mtp_layer: ModuleSpec | None = None
    """None takes the last layer of the stage, which is right wherever layers of a kind are alike."""


def get_layer_spec(
    config: TransformerConfig,
    *,
    is_moe: bool = False,
    attention: ModuleSpec | None = None,
    post_self_attn_layernorm: bool = False,
    post_mlp_layernorm: bool = False,
) -> ModuleSpec:
    """One transformer layer: norm, self-attention, norm, MLP or experts.

    Args:
        config: decides the kind of attention and its sizes.
        is_moe: experts in place of the MLP.
        attention: in place of the attention that ``config`` asks for.
        post_self_attn_layernorm: a norm behind attention, before its output is added (GLM-4).
        post_mlp_layernorm: the same behind the MLP.
    """
    if attention is None:
        attention = latent_attention_spec(config) if config.multi_latent_attention else _attention_spec(config)
    keys_map = {}
    if not config.multi_latent_attention:
        keys_map["input_layernorm."] = "self_attention.linear_qkv.layer_norm_"
    if not is_moe:
        keys_map["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
    parts = {
        "input_layernorm": Norm,
        "self_attention": attention,
        "self_attn_bda": get_bias_dropout_add,
        "pre_mlp_layernorm": Norm,
        "mlp": mlp_spec(is_moe=is_moe),
        "mlp_bda": get_bias_dropout_add,
        "sharded_state_dict_keys_map": keys_map,
    }
    if not (post_self_attn_layernorm or post_mlp_layernorm):
        return ModuleSpec(module=RoutedLayer, submodules=TransformerLayerSubmodules(**parts))
    parts["post_self_attn_layernorm"] = Norm if post_self_attn_layernorm else IdentityOp
    parts["post_mlp_layernorm"] = Norm if post_mlp_layernorm else IdentityOp
    return ModuleSpec(module=SandwichLayer, submodules=SandwichLayerSubmodules(**parts))


def get_block_spec(
    config: TransformerConfig,
    vp_stage: int | None = None,
    *,
    post_self_attn_layernorm: bool = False,
    post_mlp_layernorm: bool = False,
) -> BlockSpec:
    """The layers of this pipeline stage, and the final norm; options as in :func:`get_layer_spec`."""
    pattern = moe_layer_pattern(config)
    offset = get_transformer_layer_offset(config, vp_stage=vp_stage)
    num_layers = get_num_layers_to_build(config, vp_stage=vp_stage)

    def layer(is_moe: bool) -> ModuleSpec:
        return get_layer_spec(
            config,
            is_moe=is_moe,
            post_self_attn_layernorm=post_self_attn_layernorm,
            post_mlp_layernorm=post_mlp_layernorm,
        )

    specs = [layer(is_moe) for is_moe in pattern[offset : offset + num_layers]]
    return BlockSpec(layer_specs=specs, layer_norm=Norm, mtp_layer=layer(pattern[-1]))


def _attention_spec(config: TransformerConfig) -> ModuleSpec:
    """Multi-head or grouped-query attention."""
    provider = LocalSpecProvider()
    qk_norm = Norm if config.qk_layernorm else IdentityOp
    return ModuleSpec(
        module=PackedSelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=provider.column_parallel_linear(),
            core_attention=PackedAttention,
            linear_proj=provider.row_parallel_linear(),
            q_layernorm=qk_norm,
            k_layernorm=qk_norm,
        ),
    )
