"""Frozen weights under adapters, held in fewer bits (QLoRA, arXiv:2305.14314; here in the formats of engines).

    fp8    e4m3, one fp32 scale a block of 128 x 128        (slime.weights.quantize.block_fp8)
    int4   one bf16 scale a row and group of columns        (slime.weights.quantize.group_int, symmetric)

A product dequantizes the weight to the dtype of its input, in the forward and again in the backward pass, and keeps
nothing.  The parameter keeps its name, shape and dtype, and holds no memory.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from slime.backends.megatron_utils import cpu_platform  # noqa: F401

# isort: split
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import unwrap_model

from slime.backends.megatron_utils.layers.products import matrices, multiply_by
from slime.backends.megatron_utils.parameters import Shard
from slime.weights.quantize.block_fp8 import dequantize_block, quantize_block
from slime.weights.quantize.group_int import dequantize_group, pack, quantize_group, unpack

logger = logging.getLogger(__name__)

GROUP_SIZES = (128, 64, 32)
"""Columns of an int4 group: the first that divides them, else all."""
_CODES, _SCALES = "weight_codes", "weight_scales"
"""Buffers of the layer."""


class FrozenWeight:
    """The weight of a layer in fewer bits: buffers of the layer; with experts, one after the other."""

    def __init__(self, layer: Any, precision: str) -> None:
        self._layer, self._precision = layer, precision
        weight: Tensor = layer.weight.detach()
        self._columns = weight.size(-1)
        pairs = [self._quantized(matrix) for matrix in (weight if weight.dim() == 3 else weight[None])]
        for name, parts in zip((_CODES, _SCALES), zip(*pairs, strict=True), strict=True):
            layer.register_buffer(name, torch.stack(parts), persistent=False)
        layer.weight.data = weight.new_zeros(()).expand(weight.shape)
        vars(layer.weight).update(frozen=self, has_no_data=True)
        vars(layer.weight).setdefault("served", value_of)

    def _quantized(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        if self._precision == "fp8":
            return quantize_block(matrix)
        size = next((size for size in GROUP_SIZES if self._columns % size == 0), self._columns)
        codes, scales, _ = quantize_group(matrix, num_bits=4, groups=self._columns // size, is_symmetric=True)
        return pack(codes, 4), scales

    def numbers(self, index: int, dtype: torch.dtype, held: Sequence[Tensor] | None = None) -> Tensor:
        """Return the matrix of expert ``index`` (0 without experts); ``held``: the buffers, where not live."""
        codes, scales = held or (getattr(self._layer, _CODES), getattr(self._layer, _SCALES))
        if self._precision == "fp8":
            return dequantize_block(codes[index], scales[index], dtype=dtype)
        unpacked = unpack(codes[index], 4, self._columns)
        return dequantize_group(unpacked, scales[index], None, num_bits=4, dtype=dtype)

    def product(self, x: Tensor, weight: Tensor, index: int = 0) -> Tensor:
        """Return ``x @ numbers.T`` of x [T, K]; ``weight``, the parameter without memory, is not read."""
        return _Product.apply(x, self, index)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, frozen: FrozenWeight, index: int) -> Tensor:
        ctx.frozen, ctx.index = frozen, index
        return x @ frozen.numbers(index, x.dtype).t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad @ ctx.frozen.numbers(ctx.index, grad.dtype), None, None


@torch.no_grad()
def hold_quantized(model: Sequence[torch.nn.Module], precision: str) -> int:
    """Quantize the matrices of all layers to ``--lora-base-precision``; return how many.

    Embedding, vocabulary projection, routers and norms stay as they are.
    """
    layers = [layer for chunk in model for layer in unwrap_model(chunk).modules()]
    found = [one for layer in layers if isinstance(layer, TransformerLayer) for _, _, one in matrices(layer)]
    for module in found:
        multiply_by(FrozenWeight(module, precision), module)
    logger.info("%d frozen matrices are held in %s", len(found), precision)
    return len(found)


def value_of(shard: Shard, host_weights: Mapping[str, Tensor] | None = None) -> Tensor:
    """Return the numbers of a shard, of ``host_weights`` where given, dequantized where needed."""
    frozen: FrozenWeight | None = getattr(shard.parameter, "frozen", None)
    if frozen is None:
        return shard.value(host_weights)
    held = None
    if host_weights is not None:
        prefix = shard.key.removesuffix("weight")
        held = [host_weights[prefix + name].to(shard.parameter.device) for name in (_CODES, _SCALES)]
    return frozen.numbers(shard.expert_index or 0, shard.parameter.dtype, held)
