"""Matrices of 4- or 8-bit integers with one scale per group of columns ("pack-quantized" in compressed-tensors).

    symmetric:    scale = max(largest magnitude of the group / 7, 1e-5),   q = round(weight / scale) in -8 .. 7
    asymmetric:   scale = max((max - min) / 15, 1e-5),   z = round(-min / scale),   q = round(weight / scale) + z

(7, 8 and 15 are for 4 bits; for 8 bits they are 127, 128 and 255.)  The range of an asymmetric group includes zero.
Scales are rounded to the engine's scale dtype before weights are divided by them, so that ``q * scale`` is as close to
the weight as possible.  The stored number is unsigned: ``q + 8`` if symmetric, otherwise ``q``.  Eight 4-bit numbers
are packed into an int32, the first in the lowest bits: weights along the input dimension, zero points along the output
dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slime.utils.errors import ConfigError, DataError
from slime.weights.quantize.block_fp8 import require_finite

MIN_SCALE = 1e-5
WORD_BITS = 32
AWQ_ORDER = {4: (0, 4, 1, 5, 2, 6, 3, 7), 8: (0, 2, 1, 3)}
"""Number of bits -> position in the word of each of the adjacent numbers packed into it, in AWQ's layout."""


def quantize_group(
    weight: Tensor,
    *,
    num_bits: int,
    groups: int,
    is_symmetric: bool,
    scale_dtype: torch.dtype = torch.bfloat16,
    name: str | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Quantize with one scale per row and group of columns.

    Args:
        weight: ``[M, N]`` of bf16, fp16 or fp32.
        name: the tensor's name; if given, NaN or infinity raises an error (which synchronizes with the device).

    Returns:
        The unsigned numbers ``[M, N]`` uint8, the scales ``[M, groups]``, the zero points ``[M, groups]`` uint8 or
        None.

    Raises:
        DataError: ``name`` is given and the weight is not finite.
    """
    rows, columns = weight.shape
    top = (1 << num_bits) - 1
    values = weight.float().reshape(rows, groups, -1)
    low = values.amin(dim=2, keepdim=True)
    high = values.amax(dim=2, keepdim=True)
    if is_symmetric:
        spread, steps = torch.maximum(-low, high), top // 2
    else:
        low = low.clamp(max=0)
        spread, steps = high.clamp(min=0) - low, top
    # By a tensor: torch multiplies CUDA tensors by the reciprocal of a number.
    scale = spread / torch.full((), float(steps), dtype=torch.float32, device=weight.device)
    scale = scale.clamp(min=MIN_SCALE).to(scale_dtype)
    if name is not None:
        require_finite(name, scale)
    divisor = scale.float()
    zeros = torch.full_like(divisor, (top + 1) // 2) if is_symmetric else torch.round(-low / divisor).clamp(0, top)
    quantized = (torch.round(values / divisor) + zeros).clamp(0, top).to(torch.uint8)
    return quantized.view(rows, columns), scale.squeeze(2), None if is_symmetric else zeros.to(torch.uint8).squeeze(2)


def dequantize_group(
    quantized: Tensor, scale: Tensor, zeros: Tensor | None, *, num_bits: int, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Invert :func:`quantize_group` up to rounding: ``(q - zero point) * scale`` in fp32, then one cast.

    Raises:
        DataError: the number of scales does not match the matrix.
    """
    rows, columns = quantized.shape
    if scale.size(0) != rows or scale.size(1) == 0 or columns % scale.size(1):
        raise DataError(
            f"{tuple(scale.shape)} scales for a {rows} x {columns} tensor; group_size of the config.json does not fit "
            "the tensors"
        )
    offset = 1 << (num_bits - 1) if zeros is None else zeros.float()[:, :, None]
    values = quantized.float().view(rows, scale.size(1), -1) - offset
    return (values * scale.float()[:, :, None]).view(rows, columns).to(dtype)


def num_groups(columns: int, group_size: int | None, name: str) -> int:
    """Return the number of groups per row; one if ``group_size`` is None.

    Raises:
        ConfigError: ``group_size`` does not divide ``columns``.
    """
    if group_size is None:
        return 1
    if group_size < 1 or columns % group_size:
        raise ConfigError(
            f"{name} has {columns} columns, which is not a multiple of the group size {group_size}; convert the "
            "checkpoint with another --group-size, or leave this matrix out (--ignore-rules)"
        )
    return columns // group_size


def num_words(count: int, num_bits: int) -> int:
    """Return the number of int32 words that ``count`` numbers take."""
    return -(-count * num_bits // WORD_BITS)


def pack(values: Tensor, num_bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Pack ``num_bits``-bit numbers into words along the last dimension.

    Args:
        values: uint8 ``[..., n]``, below ``2 ** num_bits``.
        order: position in the word of each of the adjacent numbers; None keeps their order.

    Returns:
        int32 ``[..., ceil(n * num_bits / 32)]``, zero-padded at the end.
    """
    per_word = WORD_BITS // num_bits
    padded = values.new_zeros(*values.shape[:-1], num_words(values.size(-1), num_bits) * per_word)
    padded[..., : values.size(-1)] = values
    words = padded.view(*values.shape[:-1], -1, per_word)
    if order is not None:
        words = words[..., sorted(range(per_word), key=lambda index: order[index])]
    if num_bits == 4:
        words = words[..., 0::2] | words[..., 1::2] << 4
    return words.contiguous().view(torch.int32).squeeze(-1)


def unpack(words: Tensor, num_bits: int, count: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Invert :func:`pack`: uint8 ``[..., count]``."""
    values = words.contiguous().unsqueeze(-1).view(torch.uint8)
    if num_bits == 4:
        values = torch.stack([values & 15, values >> 4], dim=-1).flatten(-2)
    if order is not None:
        values = values[..., list(order)]
    return values.flatten(-2)[..., :count]


def zero_point_order(name: str, num_bits: int) -> tuple[int, ...] | None:
    """Return the packing order of a weight's zero points: SGLang's kernels for routed experts need AWQ's order."""
    return AWQ_ORDER[num_bits] if ".experts." in name else None
