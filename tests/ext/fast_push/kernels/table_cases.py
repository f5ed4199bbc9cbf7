"""Items of every kind, dtype, alignment and shape for the tables of ``slime.ext.fast_push.kernels``.

The same cases run in plain torch, in Triton's interpreter (small blocks on a CPU) and compiled (128 x 128 on a GPU).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from slime.ext.fast_push.kernels.tables import CastItem, CastTable, CopyItem, as_unsigned
from slime.ext.fast_push.manifest import align
from slime.weights.digest import digest_bytes
from slime.weights.quantize.block_fp8 import num_blocks

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def weights(rows: int, columns: int, dtype: torch.dtype, device: str, seed: int) -> Tensor:
    """Magnitudes over many octaves, zeros of both signs, a zero row; fp32 values that bf16 can represent.

    (Triton's interpreter truncates in casts to bf16, where GPUs round; the GPU tests use other values.)
    """
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, columns, generator=generator)
    values *= torch.exp2(torch.randint(-12, 4, (rows, columns), generator=generator).float())
    values.view(-1)[::7] = 0.0
    values.view(-1)[3::11] = -0.0
    if rows > 2:
        values[rows // 2] = 0.0
    return values.bfloat16().to(dtype).to(device)


def cast_items(device: str, block: int, out_dtype: torch.dtype, *, kinds: tuple[str, ...] = ()) -> list[CastItem]:
    """All kinds, or only ``kinds``; the sizes follow ``block``."""
    items: list[CastItem] = []
    end = 0
    seed = 0

    def add(kind, dtype, rows, columns, *, run=None, stride=0, pad=0, offset=0):
        nonlocal end, seed
        seed += 1
        if kinds and kind not in kinds:
            return
        num_runs = math.ceil(rows / run) if run else 1
        source_rows = (num_runs - 1) * stride + run if run else rows
        wide = weights(source_rows, columns + pad, dtype, device, seed)
        source = wide[:, pad // 2 : pad // 2 + columns]
        begin = align(end) + offset
        size = 1 if kind.startswith("fp8") else source.element_size() if kind == "copy" else out_dtype.itemsize
        end = begin + rows * columns * size
        scale = None
        if kind.startswith("fp8"):
            scale = align(end)
            end = scale + 4 * math.prod(num_blocks(rows, columns, (block, block)))
        items.append(CastItem(source, run or rows, stride, rows, begin, kind, scale))

    for kind in ("fp8_block", "fp8_block_ue8m0"):
        for dtype in FLOATS:
            add(kind, dtype, block, 2 * block)  # whole blocks
            add(kind, dtype, block + 5, block + 16)  # partial blocks, whole vectors
            add(kind, dtype, block - 3, block + 7, offset=8)  # partial blocks and vectors
        add(kind, torch.bfloat16, 3, 1)
        add(kind, torch.bfloat16, block, 2 * block, pad=32)  # some columns of a wider matrix
        add(kind, torch.bfloat16, block, block, pad=6)
        add(kind, torch.bfloat16, 4 * block, block, run=2 * block, stride=3 * block)  # runs of whole blocks
        add(kind, torch.bfloat16, 2 * block + 8, block, run=24, stride=40)  # runs that blocks cross
        add(kind, torch.float32, 2 * block, block, run=1, stride=2)
    for dtype in (*FLOATS, torch.int64, torch.uint8, torch.float64, torch.bool):
        source = "copy"
        add(source, dtype, 5, 1024)
        add(source, dtype, 1, 6000)  # one long row
        add(source, dtype, 7, 33, pad=2)
    add("copy", torch.bfloat16, 40, 64, run=8, stride=24)
    add("copy", torch.bfloat16, 21, 64, run=8, stride=24)  # the last run is partial
    add("copy", torch.bfloat16, 9, 10, run=1, stride=3, offset=8)
    add("copy", torch.bfloat16, 1, 1)
    for dtype in (*FLOATS, torch.float64):
        add("cast", dtype, 19, 300)
        add("cast", dtype, 1, 5000)
        add("cast", dtype, 20, 31, run=4, stride=9, pad=3)
    return items


def filled(items: list[CastItem], out_dtype: torch.dtype, block: int, use_triton: bool) -> Tensor:
    """The bucket of these items, its gaps full of 0xA5, written with and without digests, which are checked."""
    table = CastTable(items, out_dtype, (block, block), use_triton=use_triton)
    plain, digested = (
        torch.full((align(table.num_bytes),), 0xA5, dtype=torch.uint8, device=items[0].source.device) for _ in range(2)
    )
    table.run(plain)
    digests = as_unsigned(table.run_with_digests(digested))
    assert digested.equal(plain)
    data = plain.cpu()
    for (offset, size), digest in zip(table.segments, digests, strict=True):
        assert digest == digest_bytes(data[offset : offset + size]), f"{size} bytes at {offset}"
    return plain


def joined_items(device: str) -> tuple[list[CastItem], list[tuple[int, int]]]:
    """Segments made of several items, one with a gap, in no order; and an item outside all segments."""
    wide = weights(64, 48, torch.bfloat16, device, 90)
    narrow = weights(8, 5, torch.bfloat16, device, 91)
    items = [
        CastItem(wide, 24, 0, 24, 512, "copy"),
        CastItem(wide[24:], 8, 16, 24, 512 + 24 * 96, "copy"),
        CastItem(wide, 32, 0, 32, 8192, "fp8_block", 12288),
        CastItem(wide[32:], 32, 0, 32, 8192 + 32 * 48, "fp8_block", 12288 + 8),
        CastItem(wide, 16, 0, 16, 16384, "copy"),
        CastItem(narrow, 8, 0, 8, 16384 + 16 * 96, "copy"),
        CastItem(wide, 16, 0, 16, 32768, "copy"),
        CastItem(wide, 4, 0, 4, 20480, "copy"),
    ]
    return items, [(12288, 16), (8192, 64 * 48), (32768, 32 * 96), (512, 48 * 96), (16384, 16 * 96 + 80)]


def check_joined_items(device: str, use_triton: bool) -> None:
    items, segments = joined_items(device)
    table = CastTable(items, torch.bfloat16, (32, 32), use_triton=use_triton, segments=segments)
    out = torch.full((align(table.num_bytes),), 0xA5, dtype=torch.uint8, device=device)
    digests = as_unsigned(table.run_with_digests(out))
    data = out.cpu()
    assert digests == [digest_bytes(data[offset : offset + size]) for offset, size in segments]


def copy_items(device: str, flat: Tensor) -> list[CopyItem]:
    """Rectangles of 1 to 4 dimensions, contiguous and strided on both sides, with equal and different dtypes; ``flat``
    is filled with what they read."""
    items: list[CopyItem] = []
    end = 0
    seed = 100

    def add(src_dtype, dst_dtype, full, window=None, *, transposed=False, offset=0, dst_pad=0):
        """A window of a tensor of shape ``full`` in the bucket, to a separate destination."""
        nonlocal end, seed
        seed += 1
        values = weights(1, math.prod(full), src_dtype, "cpu", seed).view(-1)
        begin = align(end) + offset
        end = begin + values.numel() * src_dtype.itemsize
        flat[begin:end] = values.view(torch.uint8).to(flat.device)
        window = window or tuple(slice(0, size) for size in full)
        strides = [math.prod(full[axis + 1 :]) for axis in range(len(full))]
        shape = [part.stop - part.start for part in window]
        first = sum(part.start * stride for part, stride in zip(window, strides))
        if transposed:
            dst = torch.zeros(*shape[:-2], shape[-1], shape[-2], dtype=dst_dtype, device=device).transpose(-1, -2)
        else:
            wide = [*shape[:-1], shape[-1] + dst_pad] if shape else []
            dst = torch.zeros(wide, dtype=dst_dtype, device=device)[(..., *(slice(size) for size in shape[-1:]))]
        items.append(CopyItem(dst, begin + first * src_dtype.itemsize, tuple(strides), src_dtype))

    for dtype in (*FLOATS, torch.uint8, torch.int64):
        add(dtype, dtype, (20000,))
        add(dtype, dtype, (33, 7), offset=8)
        add(dtype, dtype, (64, 96), (slice(16, 48), slice(32, 64)))
        add(dtype, dtype, (64, 96), (slice(1, 60), slice(3, 90)), dst_pad=5)
        add(dtype, dtype, (24, 40), transposed=True)
    add(torch.bfloat16, torch.bfloat16, (4, 32, 64), (slice(1, 3), slice(0, 32), slice(16, 48)), dst_pad=16)
    add(torch.bfloat16, torch.bfloat16, (2, 3, 8, 16), (slice(0, 2), slice(1, 3), slice(2, 7), slice(3, 9)))
    add(torch.bfloat16, torch.bfloat16, (1, 1))
    add(torch.float32, torch.float32, ())
    for src in FLOATS:
        for dst in FLOATS:
            add(src, dst, (40, 520), (slice(3, 33), slice(8, 520)), dst_pad=8)
    add(torch.float64, torch.float32, (10, 10))
    add(torch.bfloat16, torch.bfloat16, (0, 8))
    return items


COPY_BYTES = 1 << 21
"""More than the bucket of :func:`copy_items` needs."""
