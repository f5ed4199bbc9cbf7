"""A transformer layer with a norm on both sides of attention and MLP, as GLM-4 has it.

    h = h + post_self_attn_layernorm(attention(input_layernorm(h)))
    h = h + post_mlp_layernorm(mlp(pre_mlp_layernorm(h)))

megatron-core's layer knows the norms in front only.  The parameters are named as a Megatron that knows these options
names them, in memory and on disk: ``post_self_attn_layernorm.weight``, ``post_mlp_layernorm.weight``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slime.backends.megatron_utils import cpu_platform  # noqa: F401

# isort: split
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

from slime.backends.megatron_utils.layers.routed_layer import RoutedLayer

OutputWithBias = tuple[Tensor, Tensor | None]
ResidualAdd = Callable[[OutputWithBias, Tensor, float], Tensor]
GetResidualAdd = Callable[[bool, bool], ResidualAdd]
"""(training, fused) to the function: what megatron-core calls bias-dropout-add."""


@dataclass
class SandwichLayerSubmodules(TransformerLayerSubmodules):
    """The parts of a layer, with the norms behind attention and MLP; either may be left out."""

    post_self_attn_layernorm: ModuleSpec | type = IdentityOp
    post_mlp_layernorm: ModuleSpec | type = IdentityOp


class SandwichLayer(RoutedLayer):
    """Layer whose residual adds are preceded by a norm.

    megatron-core calls ``self_attn_bda`` and ``mlp_bda`` (bias, dropout, add) at just these two places, whatever is
    recomputed or sharded around them; so the norms are put in front of them.
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
        # The stock handler turns gradients on, which does no harm to an add of tensors that need none.  A norm has a
        # weight: a pass without gradients, or the first pass of a recomputed layer, would keep a graph for it.
        self.bias_dropout_add_exec_handler = nullcontext


def _norm_first(norm: torch.nn.Module, get_residual_add: GetResidualAdd) -> GetResidualAdd:
    """``get_residual_add`` with ``norm`` applied to what is added."""

    def get_norm_and_add(training: bool, fused: bool) -> ResidualAdd:
        residual_add = get_residual_add(training, fused)

        def norm_and_add(output_with_bias: OutputWithBias, residual: Tensor, dropout: float) -> Tensor:
            output, bias = output_with_bias
            return residual_add((norm(output if bias is None else output + bias), None), residual, dropout)

        return norm_and_add

    return get_norm_and_add
