"""Matrix products of the layers in FP8 by blocks (``--fp8-format e4m3 --fp8-recipe blockwise``).

    y  = q(x) q(W)^T          x by 1 x 128 along its row,       W by 128 x 128
    dx = q(dy) q(W)           dy by 1 x 128 along its row,      W by 128 x 128
    dW = q(dy^T) q(x^T)^T     both by 1 x 128 along the tokens

q is ``slime.weights.quantize.block_fp8``: a weight gets the bytes and scales that the push quantizer gives an engine,
a row of activations those that SGLang gives it before its product.  Gradients go straight through q.  Parameters,
their gradients and everything between two products keep their dtype.

On Hopper the products are cuBLAS's block-scaled ones (torch >= 2.10, CUDA >= 12.9), where both sides of the weight are
multiples of 128.  Everywhere else the quantized numbers are multiplied as plain ones (in fp32 on a CPU, in the
activations' dtype on a GPU): the same q, other rounding of the sum.

Shapes: T = tokens, N = outputs, K = inputs.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from slime.backends.megatron_utils import cpu_platform  # noqa: F401

# isort: split
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

from slime.backends.megatron_utils.layers.experts import StackedLinear
from slime.backends.megatron_utils.layers.products import matrices, multiply_by
from slime.backends.megatron_utils.model_transform import ModelTransform
from slime.weights.quantize.block_fp8 import DEFAULT_BLOCK, dequantize_block, quantize_block

logger = logging.getLogger(__name__)

BLOCK = DEFAULT_BLOCK[0]
ROW = (1, BLOCK)


def rounded(matrix: Tensor, block: tuple[int, int]) -> Tensor:
    """Return q(matrix) as numbers: fp32 on a CPU, in the matrix's dtype on a GPU."""
    quantized, scale = quantize_block(matrix, block)
    return dequantize_block(quantized, scale, block, dtype=matrix.dtype if matrix.is_cuda else torch.float32)


class Fp8Product(torch.autograd.Function):
    """``x @ weight.T`` of x [T, K] and weight [N, K], all three products of the module's docstring."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        if kernels := kernels_for(x, weight):
            return kernels.by_weight(x, weight)
        return (rounded(x, ROW) @ rounded(weight, DEFAULT_BLOCK).t()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        grad = grad.contiguous()
        kernels = kernels_for(x, weight)
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            if kernels:
                grad_x = kernels.by_transposed_weight(grad, weight)
            else:
                grad_x = (rounded(grad, ROW) @ rounded(weight, DEFAULT_BLOCK)).to(x.dtype)
        if ctx.needs_input_grad[1]:
            if kernels:
                grad_weight = kernels.over_tokens(grad, x)
            else:
                over_tokens = rounded(grad.t().contiguous(), ROW) @ rounded(x.t().contiguous(), ROW).t()
                grad_weight = over_tokens.to(weight.dtype)
        return grad_x, grad_weight


def kernels_for(x: Tensor, weight: Tensor) -> ModuleType | None:
    """Return the kernels where they apply: Hopper, bf16, both sides of the weight multiples of 128."""
    if not x.is_cuda or x.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16 or not len(x):
        return None
    if any(size % BLOCK for size in weight.shape):
        return None
    from slime.ext.low_precision import fp8_kernels

    return fp8_kernels if fp8_kernels.are_proven(x.device) else None


@dataclass(frozen=True)
class Rows:
    """The matrices that an engine quantizes for themselves and Megatron holds as one.

    Gates and ups, or queries, keys and values, are different matrices of the checkpoint; a block of 128 rows that lay
    across two of them would have a scale that no engine has.
    """

    parts: tuple[int, ...] = ()
    """Rows of each, in order; () for one matrix."""
    order: Tensor | None = None
    """[N]: row of Megatron's matrix that is the row of the checkpoint's; None where the order is the same."""

    def product(self, x: Tensor, weight: Tensor, index: int = 0) -> Tensor:
        """Return ``x @ weight.T``, [T, N], the columns in Megatron's order."""
        if self.order is not None:
            weight = weight.index_select(0, self.order.to(weight.device))
        if any(part % BLOCK for part in self.parts[:-1]):
            y = torch.cat([Fp8Product.apply(x, part) for part in weight.split(self.parts)], dim=-1)
        else:
            y = Fp8Product.apply(x, weight)
        return y if self.order is None else y.index_select(1, self.order.argsort().to(y.device))


class Fp8(ModelTransform):
    """Lets the matrices of the model's layers be multiplied in FP8.

    Embedding, vocabulary projection, routers, norms and what joins an MTP layer to the model stay as they are, and so
    do the layers of ``--first-last-layers-bf16``.
    """

    def after_build(self, chunk: torch.nn.Module) -> None:
        """Change the layers of a chunk."""
        count = 0
        for layer in chunk.modules():
            if isinstance(layer, TransformerLayer) and not _stays_bf16(layer):
                for owner, name, module in matrices(layer):
                    multiply_by(_rows_of(owner, name, module), module)
                    count += 1
        logger.info("%d matrices are multiplied in FP8 by blocks", count)


def _stays_bf16(layer: TransformerLayer) -> bool:
    number, config = layer.layer_number, layer.config
    if not config.first_last_layers_bf16:
        return False
    # The layers of MTP are numbered on from the model's own, and are none of its last.
    first_of_end = config.num_layers - config.num_layers_at_end_in_bf16 + 1
    return number <= config.num_layers_at_start_in_bf16 or first_of_end <= number <= config.num_layers


def _rows_of(owner: torch.nn.Module, name: str, module: torch.nn.Module) -> Rows:
    assert isinstance(module.weight, Tensor)
    num_rows = module.weight.shape[-2]
    if isinstance(module, StackedLinear):
        is_gated = module.is_gated
    else:
        is_gated = isinstance(owner, MLP) and name == "linear_fc1" and owner.config.gated_linear_unit
    if is_gated:
        return Rows((num_rows // 2, num_rows // 2))
    if isinstance(owner, SelfAttention) and name == "linear_qkv":
        return qkv_rows(owner.config, num_rows)
    return Rows()


def qkv_rows(config: TransformerConfig, num_rows: int) -> Rows:
    """Return the rows of queries (with their gates), keys and values, which Megatron interleaves by group of heads."""
    width = config.kv_channels
    assert width is not None
    if width % BLOCK == 0:
        return Rows()  # a block is within one head
    groups = config.num_query_groups or config.num_attention_heads
    per_group = config.num_attention_heads // groups * width * (2 if config.attention_output_gate else 1)
    local_groups = max(1, num_rows // (per_group + 2 * width))
    index = torch.arange(num_rows).view(local_groups, -1)
    query, key, value = index.split([index.size(1) - 2 * width, width, width], dim=1)
    if config.attention_output_gate:
        # Megatron has a group's gates behind its queries, the checkpoint each head's gate behind its query.
        query = query.unflatten(1, (2, -1, width)).transpose(1, 2).flatten(1)
    parts = (query, key, value)
    return Rows(tuple(part.numel() for part in parts), torch.cat([part.flatten() for part in parts]))
