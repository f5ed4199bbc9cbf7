"""The layers of a GPT model, built from megatron-core's modules with our norm and our packed attention.

megatron-core's ready-made specs need TransformerEngine for packed sequences and for norms under sequence parallelism.
The names on disk are TransformerEngine's (a fused ``linear_qkv.layer_norm_weight``), so checkpoints can be exchanged
with a Megatron that uses it.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from torch import Tensor

from slime.backends.megatron_utils.flags.model_dims import moe_layers
from slime.backends.megatron_utils.layers.attention import PackedAttention, PackedSelfAttention
from slime.backends.megatron_utils.layers.experts import StackedExperts
from slime.backends.megatron_utils.layers.latent_attention import latent_attention_spec
from slime.backends.megatron_utils.layers.norm import Norm
from slime.backends.megatron_utils.layers.router import Router, RouterInputs
from slime.backends.megatron_utils.layers.token_dispatcher import GatherDispatcher


@dataclass
class BlockSpec(TransformerBlockSubmodules):
    """The layers of a pipeline stage, the final norm, and the transformer layer inside each MTP layer."""

    mtp_layer: ModuleSpec | None = None
    """None uses the last layer of the stage, which is correct if all layers of a kind are equal."""
    finish: Callable[[Any], None] | None = None
    """Called with the built model of this stage, to add modules that the family has outside of its layers."""


def get_layer_spec(
    config: TransformerConfig,
    *,
    is_moe: bool = False,
    post_self_attn_layernorm: bool = False,
    post_mlp_layernorm: bool = False,
) -> ModuleSpec:
    """Return one transformer layer: norm, self-attention, norm, MLP or experts.

    Args:
        post_self_attn_layernorm: add a norm after attention, before the residual add (GLM-4).
        post_mlp_layernorm: the same after the MLP.
    """
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
        "mlp": RoutedExperts if is_moe else ModuleSpec(module=MLP, submodules=_mlp_matrices()),
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
    change: Callable[[ModuleSpec, int], ModuleSpec] | None = None,
    **norms: bool,
) -> BlockSpec:
    """Return the layers of this pipeline stage, and the final norm.

    Args:
        change: (layer, its number over the whole model, counted from 1) -> the layer that replaces it.
    """
    frequency = [0] * config.num_layers if config.num_moe_experts is None else config.moe_layer_freq
    pattern = moe_layers(frequency, config.num_layers)
    offset = get_transformer_layer_offset(config, vp_stage=vp_stage)
    specs = []
    for index in range(offset, offset + get_num_layers_to_build(config, vp_stage=vp_stage)):
        layer = get_layer_spec(config, is_moe=pattern[index], **norms)
        specs.append(layer if change is None else change(layer, index + 1))
    mtp_layer = get_layer_spec(config, is_moe=pattern[-1], **norms)
    return BlockSpec(layer_specs=specs, layer_norm=Norm, mtp_layer=mtp_layer)


def block_spec_of_flags(args: Namespace, config: TransformerConfig, vp_stage: int | None = None) -> BlockSpec:
    """Return the layers that the model flags describe; has the signature of a ``--spec`` function."""
    return get_block_spec(
        config,
        vp_stage,
        post_self_attn_layernorm=args.post_self_attn_layernorm,
        post_mlp_layernorm=args.post_mlp_layernorm,
    )


def _attention_spec(config: TransformerConfig) -> ModuleSpec:
    """Return multi-head or grouped-query attention."""
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


def _mlp_matrices() -> MLPSubmodules:
    return MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)


# The layer classes.  megatron-core passes the packing of a micro-batch to attention, but not to the router; these
# layers and their experts pass it on.


class RoutedLayer(TransformerLayer):
    """TransformerLayer that passes the router's inputs to its experts, as megatron-core's padding mask."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the parent's forward; ``packed_seq_params`` may carry samples and the experts to choose."""
        kwargs["padding_mask"] = RouterInputs.of(kwargs.get("packed_seq_params"))
        return super().forward(*args, **kwargs)


class RoutedExperts(MoELayer):
    """MoELayer with our token dispatcher that gives its router the inputs of the current pass.

    The inputs belong to a pass, not to the layer: passes of several micro-batches interleave, and recomputation
    repeats a pass later.
    """

    moe_layer_recompute: bool
    router_class: type[Router] = Router
    """Overridden by families that choose experts differently."""

    def __init__(self, config: TransformerConfig, submodules: MoESubmodules | None = None, **kwargs: Any) -> None:
        """Build the layer; ``submodules`` replaces our router and experts.  The config decides on shared experts."""
        shared = ModuleSpec(module=SharedExpertMLP, submodules=_mlp_matrices())
        own = MoESubmodules(router=self.router_class, experts=StackedExperts, shared_experts=shared)
        super().__init__(config, submodules or own, **kwargs)
        # Recomputed here instead, with the router's inputs of the pass.
        self.recomputes, self.moe_layer_recompute = self.moe_layer_recompute, False
        if GatherDispatcher.serves(self.config):
            self.token_dispatcher = GatherDispatcher(self.num_local_experts, self.config, get_default_pg_collection())

    def forward(
        self, hidden_states: Tensor, intermediate_tensors: Any = None, padding_mask: RouterInputs | None = None
    ) -> Any:
        """Map [t, 1, hidden] to [t, 1, hidden]; also return None in place of a bias."""
        run = partial(self._run, padding_mask or RouterInputs())
        if self.recomputes:
            return tensor_parallel.checkpoint(run, False, hidden_states)
        return run(hidden_states)

    def _run(self, inputs: RouterInputs, hidden_states: Tensor) -> Any:
        if isinstance(self.router, Router):
            self.router.take(inputs)
        return super().forward(hidden_states)


OutputWithBias = tuple[Tensor, Tensor | None]
ResidualAdd = Callable[[OutputWithBias, Tensor, float], Tensor]
GetResidualAdd = Callable[[bool, bool], ResidualAdd]
"""(training, fused) -> function; megatron-core's bias-dropout-add."""


@dataclass
class SandwichLayerSubmodules(TransformerLayerSubmodules):
    """The parts of a layer, including optional norms after attention and after the MLP."""

    post_self_attn_layernorm: ModuleSpec | type = IdentityOp
    post_mlp_layernorm: ModuleSpec | type = IdentityOp


class SandwichLayer(RoutedLayer):
    """Layer with norms before and after attention and MLP, as in GLM-4.

        h = h + post_self_attn_layernorm(attention(input_layernorm(h)))
        h = h + post_mlp_layernorm(mlp(pre_mlp_layernorm(h)))

    megatron-core's layer has only the norms before.  In memory and on disk the parameters have the names of Megatron
    versions that support both: ``post_self_attn_layernorm.weight``, ``post_mlp_layernorm.weight``.

    megatron-core calls ``self_attn_bda`` and ``mlp_bda`` (bias, dropout, add) at exactly these two places, whatever is
    recomputed or sharded around them, so the norms run in front of these calls.
    """

    def __init__(
        self, config: TransformerConfig, submodules: SandwichLayerSubmodules, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(config, submodules, *args, **kwargs)
        size = {"hidden_size": config.hidden_size, "eps": config.layernorm_epsilon}
        self.post_self_attn_layernorm = build_module(submodules.post_self_attn_layernorm, config=config, **size)
        self.post_mlp_layernorm = build_module(submodules.post_mlp_layernorm, config=config, **size)
        self.self_attn_bda: GetResidualAdd = _norm_first(self.post_self_attn_layernorm, self.self_attn_bda)
        self.mlp_bda: GetResidualAdd = _norm_first(self.post_mlp_layernorm, self.mlp_bda)
        # The stock handler enables gradients, which is harmless for an add of tensors that need none.  But a norm has
        # a weight: a pass without gradients, or the first pass of a recomputed layer, would keep a graph for it.
        self.bias_dropout_add_exec_handler = nullcontext


def _norm_first(norm: torch.nn.Module, get_residual_add: GetResidualAdd) -> GetResidualAdd:
    """Return ``get_residual_add`` with ``norm`` applied to what is added."""

    def get_norm_and_add(training: bool, fused: bool) -> ResidualAdd:
        residual_add = get_residual_add(training, fused)

        def norm_and_add(output_with_bias: OutputWithBias, residual: Tensor, dropout: float) -> Tensor:
            output, bias = output_with_bias
            return residual_add((norm(output if bias is None else output + bias), None), residual, dropout)

        return norm_and_add

    return get_norm_and_add
