"""One pass over the memory of a parameter, its gradient and its low-precision moments.  The numbers: ``adam``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_FP16_LARGEST = tl.constexpr(32768.0)


@triton.jit
def _round_stochastically(x, noise, BITS: tl.constexpr):
    """Add noise [int32, uniform] below the last ``BITS`` bits of fp32 and drop them."""
    mask: tl.constexpr = (1 << BITS) - 1
    bits = x.to(tl.int32, bitcast=True) + (noise & mask)
    return (bits & ~mask).to(tl.float32, bitcast=True)


@triton.jit
def _load(moment, scales, offsets, inside, block):
    x = tl.load(moment + offsets, mask=inside, other=0.0).to(tl.float32)
    if moment.dtype.element_ty == tl.float16:
        x = x * tl.load(scales + block)
    return x


@triton.jit
def _store(x, moment, scales, offsets, inside, block, noise):
    if moment.dtype.element_ty == tl.float16:
        least = tl.max(tl.where(inside, tl.abs(x), 0.0), axis=0) / _FP16_LARGEST
        # The next power of two: the exponent of fp32 plus one, without the mantissa.
        exponent = ((least.to(tl.int32, bitcast=True) >> 23) + 1) << 23
        scale = tl.where(least > 7.888609052210118e-31, exponent.to(tl.float32, bitcast=True), 1.0)  # 2 ** -100
        tl.store(scales + block, scale)
        x = _round_stochastically(x / scale, noise, 13)
    elif moment.dtype.element_ty == tl.bfloat16:
        x = _round_stochastically(x, noise, 16)
    tl.store(moment + offsets, x.to(moment.dtype.element_ty), mask=inside)


@triton.jit
def _step(
    parameter,
    gradient,
    first,
    first_scales,
    second,
    second_scales,
    num_elements,
    share1,
    share2,
    beta2,
    keep,
    rate,
    root,
    eps,
    seed,
    SIZE: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64)
    offsets = block * SIZE + tl.arange(0, SIZE)
    inside = offsets < num_elements
    g = tl.load(gradient + offsets, mask=inside, other=0.0).to(tl.float32)
    p = tl.load(parameter + offsets, mask=inside, other=0.0)
    m = _load(first, first_scales, offsets, inside, block)
    v = _load(second, second_scales, offsets, inside, block)
    m = m + share1 * (g - m)
    v = beta2 * v + share2 * g * g
    p = keep * p - rate * m / (tl.sqrt(v) / root + eps)
    tl.store(parameter + offsets, p, mask=inside)
    noise, other, _, _ = tl.randint4x(seed, offsets)
    _store(m, first, first_scales, offsets, inside, block, noise.to(tl.int32, bitcast=True))
    _store(v, second, second_scales, offsets, inside, block, other.to(tl.int32, bitcast=True))


def launch_step(
    parameter: Tensor,
    gradient: Tensor,
    state: dict[str, Tensor],
    numbers: dict[str, float],
    seed: int,
    block: int,
) -> None:
    """Update a parameter [fp32, contiguous] and its moments in place.

    Args:
        state: ``exp_avg`` and ``exp_avg_sq``, with ``..._scale`` [blocks, fp32] where one is fp16.
        block: elements that share the scale of an fp16 moment; a power of two.
    """
    assert parameter.is_contiguous() and gradient.is_contiguous() and parameter.dtype == torch.float32
    first, second = state["exp_avg"], state["exp_avg_sq"]
    with torch.cuda.device(parameter.device):
        _step[(triton.cdiv(parameter.numel(), block),)](
            parameter,
            gradient,
            first,
            state.get("exp_avg_scale", parameter),
            second,
            state.get("exp_avg_sq_scale", parameter),
            parameter.numel(),
            numbers["share1"],
            numbers["share2"],
            numbers["beta2"],
            numbers["keep"],
            numbers["rate"],
            numbers["root"],
            numbers["eps"],
            seed,
            SIZE=block,
        )
