"""Kernels of causal attention over packed sequences, and the choice of a flash kernel.

Shapes: t = tokens of all sequences, h = heads, d = head dimension.  Queries, keys and values are [t, h, d]; with
grouped queries, keys and values have fewer heads.  The last query of a sequence is at the position of its last key.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import logging
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from slime.backends.megatron_utils.layers.sink_attention import sink_attention, visible_keys
from slime.utils import env

logger = logging.getLogger(__name__)


def per_sequence_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths_q: list[int],
    lengths_k: list[int],
    *,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend one sequence at a time, on any device and in any dtype."""
    pieces = []
    if query.is_cuda and query.size(-1) > MAX_FLASH_WIDTH and sinks is None:
        # torch's kernel for wide heads needs equally many key heads; without it the full score matrix is materialized.
        key, value = (x.repeat_interleave(query.size(1) // x.size(1), dim=1) for x in (key, value))
    for q, k, v in zip(query.split(lengths_q), key.split(lengths_k), value.split(lengths_k), strict=True):
        num_q, num_k = q.size(0), k.size(0)
        if num_q == 0:
            continue
        if sinks is not None:
            pieces.append(sink_attention(q, k, v, sinks, scale=scale, window=window))
            continue
        mask = None
        is_cut = window is not None and window < num_k
        if num_q != num_k or is_cut:
            mask = visible_keys(num_q, num_k, window, q.device)
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            k.transpose(0, 1)[None],
            v.transpose(0, 1)[None],
            attn_mask=mask,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=q.size(1) != k.size(1),
        )
        pieces.append(out[0].transpose(0, 1))
    return torch.cat(pieces)


MAX_FLASH_WIDTH = 256
"""Largest head dimension that the flash kernels support."""


class FlashKernel(Protocol):
    """Attention over all sequences in one kernel; CUDA, bf16 or fp16.  Does not synchronize with the host."""

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, *,
        scale: float, window: int | None,
    ) -> Tensor: ...  # fmt: skip


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Attend over all sequences with the faster flash kernel for this head shape; CUDA, bf16 or fp16.

    The first call for a head shape times the kernels, which takes up to half a minute if one must be compiled.
    Compiled kernels are cached in ``SLIME_CACHE_DIR``.  Later calls do not synchronize with the host.

    Args:
        query, key, value: [t, h, d].
        cu_q, cu_k: int32 [sequences + 1], cumulative numbers of queries and keys.
        max_q, max_k: the most queries and keys in a sequence.
        window: number of keys that a query sees, including its own; None for all.
    """
    shape = HeadShape(query.size(1), key.size(1), query.size(2), value.size(2), query.dtype, window)
    kernel = faster_kernel(shape, query.device)
    return kernel(query, key, value, cu_q, cu_k, max_q, max_k, scale=scale, window=window)


def torch_flash(
    query: Tensor, key: Tensor, value: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, *,
    scale: float, window: int | None,
) -> Tensor:  # fmt: skip
    """Attend with torch's kernel (FlashAttention-2, arXiv 2307.08691), which every CUDA build has."""
    attend, knows_gqa = _torch_varlen()
    width, value_width = query.size(-1), value.size(-1)
    # The kernel needs one head dimension, but in multi-latent attention values are narrower (or wider) than keys.
    padded = max(width, value_width)
    if width < padded:
        query, key = F.pad(query, (0, padded - width)), F.pad(key, (0, padded - width))
    if value_width < padded:
        value = F.pad(value, (0, padded - value_width))
    options: dict[str, Any] = {"scale": scale, "window_size": (-1 if window is None else window - 1, 0)}
    if knows_gqa:
        options["enable_gqa"] = query.size(1) != key.size(1)
    out = attend(
        query.contiguous(), key.contiguous(), value.contiguous(), cu_q.int(), cu_k.int(), max_q, max_k, **options
    )
    return out[..., :value_width]


@functools.cache
def _torch_varlen() -> tuple[Any, bool]:
    """Return torch's varlen attention, and whether it has the argument enable_gqa (torch 2.13; 2.11 infers it)."""
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn, "enable_gqa" in inspect.signature(varlen_attn).parameters


def flash_attn_4(
    query: Tensor, key: Tensor, value: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, *,
    scale: float, window: int | None,
) -> Tensor:  # fmt: skip
    """Attend with flash-attn-4, kernels for Hopper and Blackwell in a package that SGLang installs on GPUs."""
    from flash_attn.cute import flash_attn_varlen_func

    out = flash_attn_varlen_func(
        query, key, value, cu_seqlens_q=cu_q.int(), cu_seqlens_k=cu_k.int(), max_seqlen_q=max_q, max_seqlen_k=max_k,
        softmax_scale=scale, causal=window is None,
        window_size=(None, None) if window is None else (window - 1, 0),
    )  # fmt: skip
    return out[0] if isinstance(out, tuple) else out  # a tuple also has the log-sum-exp


@dataclass(frozen=True)
class HeadShape:
    """The sizes and the dtype that determine which flash kernel is faster."""

    heads: int
    groups: int
    """Number of key and value heads."""
    width: int
    value_width: int
    dtype: torch.dtype
    window: int | None


MAX_ERROR = {torch.bfloat16: 8e-3, torch.float16: 1e-3}
"""Largest relative error of output and gradients, against fp64, with which a kernel is used."""
CHECKED_QUERIES, CHECKED_KEYS = [1, 350, 33, 129], [1, 700, 33, 129]
TIMED_LENGTH, TIMED_RUNS = 8192, 5
_FLASH_ATTN_CACHE = "FLASH_ATTENTION_CUTE_DSL_CACHE"


@functools.cache
def faster_kernel(shape: HeadShape, device: torch.device) -> FlashKernel:
    """Return the flash kernel for this head shape: flash-attn-4 if it is installed, correct and faster, else torch's.

    It is correct if its output and gradients are close to those in fp64, for sequences with as many queries as keys
    and for sequences with fewer.  Rank 0 logs the choice.  Torch's kernel is used if algorithms must be deterministic.
    """
    if torch.are_deterministic_algorithms_enabled() or not _has_flash_attn_4():
        return torch_flash
    try:
        error, bound = kernel_error(flash_attn_4, shape, device), MAX_ERROR[shape.dtype]
        if not error <= bound:  # also rejects NaN
            raise RuntimeError(f"its output or gradients are {error:.1e} from fp64, at most {bound:g} is allowed")
        new_ms, old_ms = (kernel_ms(kernel, shape, device) for kernel in (flash_attn_4, torch_flash))
    except Exception as failure:  # errors of a third-party kernel compiler: any of them means torch's kernel
        _log(f"Attention of {shape}: torch's FlashAttention-2; flash-attn-4 cannot run it: {str(failure)[:300]}")
        return torch_flash
    chosen, name = (flash_attn_4, "flash-attn-4") if new_ms < old_ms else (torch_flash, "torch's FlashAttention-2")
    _log(
        f"Attention of {shape}: {name} (forward and backward of {TIMED_LENGTH} tokens: flash-attn-4 {new_ms:.2f} ms, "
        f"torch's {old_ms:.2f} ms; flash-attn-4 is {error:.1e} from fp64)"
    )
    return chosen


def _has_flash_attn_4() -> bool:
    # The package reads these on import.  By default every process compiles again.
    cache = {f"{_FLASH_ATTN_CACHE}_ENABLED": "1", f"{_FLASH_ATTN_CACHE}_DIR": str(env.cache_dir() / "flash_attention")}
    env.export({name: value for name, value in cache.items() if env.get_str(name) is None})
    try:
        return importlib.util.find_spec("flash_attn.cute") is not None
    except ImportError:  # flash_attn is not installed, or an older version that does not load
        return False


def _log(line: str) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        logger.info(line)


def kernel_error(kernel: FlashKernel, shape: HeadShape, device: torch.device) -> float:
    """Return the largest relative error, against fp64, of a kernel's output and its three gradients."""
    (query, key, value), output_grad, cu_q, cu_k = _random_case(shape, CHECKED_QUERIES, CHECKED_KEYS, device)
    inputs = query, key, value
    scale = shape.width**-0.5
    max_q, max_k = max(CHECKED_QUERIES), max(CHECKED_KEYS)
    with torch.enable_grad():
        out = kernel(query, key, value, cu_q, cu_k, max_q, max_k, scale=scale, window=shape.window)
        exact = query64, key64, value64 = [x.detach().double().requires_grad_() for x in inputs]
        expected = per_sequence_attention(
            query64, key64, value64, CHECKED_QUERIES, CHECKED_KEYS, scale=scale, window=shape.window
        )
        got = (out, *torch.autograd.grad(out, inputs, output_grad))
        wanted = (expected, *torch.autograd.grad(expected, exact, output_grad.double()))
    return max(((x.double() - y).norm() / y.norm()).item() for x, y in zip(got, wanted, strict=True))


def kernel_ms(kernel: FlashKernel, shape: HeadShape, device: torch.device) -> float:
    """Return the median milliseconds of forward and backward over one sequence of ``TIMED_LENGTH`` tokens."""
    length = TIMED_LENGTH
    (query, key, value), output_grad, cu, _ = _random_case(shape, [length], [length], device)
    times = []
    with torch.enable_grad():
        for _ in range(TIMED_RUNS + 2):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            out = kernel(query, key, value, cu, cu, length, length, scale=shape.width**-0.5, window=shape.window)
            torch.autograd.grad(out, (query, key, value), output_grad)
            end.record()
            torch.cuda.synchronize(device)
            times.append(begin.elapsed_time(end))
    return sorted(times[2:])[TIMED_RUNS // 2]


def _random_case(
    shape: HeadShape, lengths_q: list[int], lengths_k: list[int], device: torch.device
) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    """Return query, key and value, a gradient of the output, and cumulative lengths of queries and keys."""
    generator = torch.Generator(device).manual_seed(0)  # leaves the job's random state alone

    def random(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator, device=device).to(shape.dtype)

    num_q, num_k = sum(lengths_q), sum(lengths_k)
    inputs = [
        random(num_q, shape.heads, shape.width),
        random(num_k, shape.groups, shape.width),
        random(num_k, shape.groups, shape.value_width),
    ]
    cu_q, cu_k = (torch.tensor([0, *each], device=device).cumsum(0).int() for each in (lengths_q, lengths_k))
    return [x.requires_grad_() for x in inputs], random(num_q, shape.heads, shape.value_width), cu_q, cu_k
