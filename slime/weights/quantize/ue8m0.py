"""Scales that are powers of two, and the packed form in which DeepGEMM reads them on Blackwell.

UE8M0 is a byte that holds the exponent of an fp32 number and nothing else: no sign, no mantissa.
"""

from __future__ import annotations

import torch
from torch import Tensor

SCALES_PER_WORD = 4
"""Exponents in one int32, those of neighbouring blocks along the input dimension, the first in the lowest byte."""
TMA_ALIGNMENT_BYTES = 16
"""What the rows of the packed scales are padded to: the tensor memory accelerator copies no less."""


def round_up_to_power_of_two(scale: Tensor) -> Tensor:
    """The smallest powers of two that are not below the scales (fp32, positive, normal); NaN and infinity stay."""
    bits = scale.view(torch.int32)
    # A mantissa that is not zero carries into the exponent.
    rounded = ((bits + 0x007FFFFF) & 0x7F800000).view(torch.float32)
    return torch.where(torch.isfinite(scale), rounded, scale)


def is_power_of_two(scale: Tensor) -> Tensor:
    """Where an fp32 scale is one, elementwise."""
    return (scale.view(torch.int32) & 0x007FFFFF) == 0


def transform_scale_ue8m0(scale: Tensor, *, mn: int, block_rows: int = 128) -> Tensor:
    """The layout in which DeepGEMM takes scales on Blackwell: one row per row of the weight, four exponents a word.

    Args:
        scale: ``[ceil(mn / block_rows), K]`` fp32, powers of two.
        mn: rows of the weight.
        block_rows: rows of a block.

    Returns:
        int32 of shape ``[mn, ceil(K / 4)]``, column-major, its columns 16 bytes aligned.

    Raises:
        ValueError: a scale is no power of two, or there are too few.
    """
    if scale.dim() != 2 or scale.size(0) != -(-mn // block_rows):
        raise ValueError(f"{list(scale.shape)} scales for {mn} rows in blocks of {block_rows}")
    if not bool(is_power_of_two(scale.float().contiguous()).all()):
        raise ValueError("only powers of two have an eight-bit exponent form; quantize with ue8m0=True")
    exponents = (scale.float().contiguous().view(torch.int32) >> 23).to(torch.uint8)
    words = -(-scale.size(1) // SCALES_PER_WORD)
    padded = torch.zeros(scale.size(0), words * SCALES_PER_WORD, dtype=torch.uint8, device=scale.device)
    padded[:, : scale.size(1)] = exponents
    per_row = padded.view(torch.int32).repeat_interleave(block_rows, 0)[:mn]
    step = TMA_ALIGNMENT_BYTES // 4
    aligned_mn = -(-mn // step) * step
    packed = torch.zeros(words, aligned_mn, dtype=torch.int32, device=scale.device)
    packed[:, :mn] = per_row.T
    return packed.T[:mn]
