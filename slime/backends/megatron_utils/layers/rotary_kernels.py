"""Triton kernel of ``slime.backends.megatron_utils.layers.rotary``: one pass over queries or keys."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rotate_kernel(
    x_ptr, out_ptr, cos_ptr, sin_ptr, num_heads, stride_t, stride_h,
    WIDTH: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr,
    INTERLEAVED: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pair = tl.arange(0, PAIRS)
    has_pair = pair < HALF
    cos = tl.load(cos_ptr + token * HALF + pair, mask=has_pair, other=0.0)
    sin = tl.load(sin_ptr + token * HALF + pair, mask=has_pair, other=0.0)
    if INVERSE:
        sin = -sin
    first, second = pair, pair + HALF
    if INTERLEAVED:
        first, second = 2 * pair, 2 * pair + 1
    mask = (head < num_heads)[:, None] & has_pair[None, :]
    rows_in = x_ptr + token * stride_t + head[:, None] * stride_h
    rows_out = out_ptr + (token * num_heads + head[:, None]) * WIDTH
    a = tl.load(rows_in + first[None, :], mask=mask, other=0.0).to(tl.float32)
    b = tl.load(rows_in + second[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(rows_out + first[None, :], a * cos[None, :] - b * sin[None, :], mask=mask)
    tl.store(rows_out + second[None, :], b * cos[None, :] + a * sin[None, :], mask=mask)
    if WIDTH > 2 * HALF:
        rest = 2 * HALF + tl.arange(0, REST)
        mask_rest = (head < num_heads)[:, None] & (rest < WIDTH)[None, :]
        tl.store(rows_out + rest[None, :], tl.load(rows_in + rest[None, :], mask=mask_rest), mask=mask_rest)


def launch_rotation(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool, inverse: bool) -> Tensor:
    """Rotate (or rotate back) the first ``2 * cos.size(1)`` dimensions of each head.

    Returns:
        contiguous [t, h, d].
    """
    assert cos.is_contiguous() and sin.is_contiguous(), "the kernel reads the tables row by row"
    if x.stride(-1) != 1:
        x = x.contiguous()
    num_tokens, num_heads, width = x.shape
    out = torch.empty((num_tokens, num_heads, width), dtype=x.dtype, device=x.device)
    half = cos.size(1)
    heads = min(triton.next_power_of_2(num_heads), 8)
    if num_tokens:
        _rotate_kernel[(num_tokens, triton.cdiv(num_heads, heads))](
            x, out, cos, sin, num_heads, x.stride(0), x.stride(1),
            WIDTH=width, HALF=half, HEADS=heads, PAIRS=triton.next_power_of_2(half),
            REST=triton.next_power_of_2(max(width - 2 * half, 1)), INTERLEAVED=interleaved, INVERSE=inverse,
        )  # fmt: skip
    return out
