"""Multi-latent attention: queries, keys and values made from small latents (DeepSeek-V2, arXiv 2405.04434)."""

from __future__ import annotations

from slime.backends.megatron_utils import cpu_platform, wheel_fixes  # noqa: F401

# isort: split
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.post_training.modelopt.layers import Linear as ReplicatedLinear
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from slime.backends.megatron_utils.attention import PackedAttention
from slime.backends.megatron_utils.norm import Norm


def latent_attention_spec(config: TransformerConfig) -> ModuleSpec:
    """Multi-latent attention.

    The down projections are replicated.  As column-parallel layers their gradients are wrong: the gather behind them
    only splits the incoming gradient, so what the other ranks' heads contribute is lost.
    """
    provider = LocalSpecProvider()
    column = provider.column_parallel_linear()
    latent_norm = Norm if config.qk_layernorm else IdentityOp
    return ModuleSpec(
        module=MLASelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=MLASelfAttentionSubmodules(
            linear_q_proj=column,
            linear_q_down_proj=ReplicatedLinear,
            linear_q_up_proj=column,
            linear_kv_down_proj=ReplicatedLinear,
            linear_kv_up_proj=column,
            core_attention=PackedAttention,
            linear_proj=provider.row_parallel_linear(),
            q_layernorm=latent_norm,
            kv_layernorm=latent_norm,
        ),
    )
