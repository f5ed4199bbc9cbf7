"""The launch of ``CastTable``: blocks of FP8, casts and copies of a whole bucket by one kernel.

A program works at one tile: one block of FP8 (``triton_fp8``), or a piece of a matrix that is copied or cast
(``triton_tiles``).  With digests, tiles of the two usual forms are digested while they are in registers, which spares
reading them again; the few segments of other forms are digested by a launch of their own.
"""

from __future__ import annotations

import bisect
import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from slime.ext.fast_push.kernels.copy_2d import VECTOR_BYTES, Copy2D, is_aligned, matrices, tile_index
from slime.ext.fast_push.kernels.table_items import CastItem, run_in_torch
from slime.ext.fast_push.kernels.triton_digest import DigestLaunch, add_digest
from slime.ext.fast_push.kernels.triton_fp8 import quantize_block_of, quantize_pairs
from slime.ext.fast_push.kernels.triton_tiles import (
    DST,
    FIELDS,
    FIRST_TILE,
    FORM,
    LAST,
    MOVES,
    NUM_MOVES,
    POSITION,
    UNIT,
    WORDS,
    form_of,
    load_descriptor,
    move_descriptors,
    move_tile,
    on_device,
)
from slime.weights.digest import WORD_BYTES as DIGEST_BYTES
from slime.weights.quantize.block_fp8 import num_blocks

# Forms of FP8 blocks, beside those that move elements; WHOLE: rows of whole vectors.
FROM_BF16, FROM_BF16_WHOLE = tl.constexpr(1 << NUM_MOVES), tl.constexpr(2 << NUM_MOVES)
FROM_FP16, FROM_FP16_WHOLE = tl.constexpr(4 << NUM_MOVES), tl.constexpr(8 << NUM_MOVES)
FROM_FP32, FROM_FP32_WHOLE = tl.constexpr(16 << NUM_MOVES), tl.constexpr(32 << NUM_MOVES)
FP8_FROM = {
    torch.bfloat16: (FROM_BF16, FROM_BF16_WHOLE),
    torch.float16: (FROM_FP16, FROM_FP16_WHOLE),
    torch.float32: (FROM_FP32, FROM_FP32_WHOLE),
}
ONE_RUN = 1 << 30
"""Rows of a run that never ends; a multiple of every block."""
VECTOR_OF_BYTES = tl.constexpr(VECTOR_BYTES)


@dataclass(frozen=True, slots=True)
class CastShape:
    """Tile sizes of the kernel; the defaults were the fastest on an H100."""

    rows: int = 8
    columns: int = 512
    """Of a tile that is copied or cast, in four-byte words or elements."""
    num_warps: int = 8
    max_registers: int | None = 64
    """Of a thread, so that four programs fit a multiprocessor; None leaves it to the compiler."""


@triton.jit
def _copy_words(
    descriptor, tile, out, sums, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Copy one tile of the form WORDS and digest it: LAST holds the segment, POSITION where in it the descriptor's
    first 64 bits are."""
    _, _, across, rows, columns, src, src_row, _, dst, dst_row, _, segment, position = descriptor
    row = ((tile // across).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS))[:, None]
    column = (tile % across * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS))[None, :]
    source = tl.multiple_of(src.to(tl.pointer_type(tl.uint32)), VECTOR_OF_BYTES)
    target = tl.multiple_of((out + dst).to(tl.pointer_type(tl.uint32), bitcast=True), VECTOR_OF_BYTES)
    mask = (row < rows) & (column < columns * UNIT)
    word = tl.load(source + row * (src_row * UNIT) + column, mask=mask, other=0)
    tl.store(target + row * (dst_row * UNIT) + column, word, mask=mask)
    low, high = tl.split(tl.reshape(word.to(tl.uint64), (TILE_ROWS, TILE_COLUMNS // 2, 2)))
    pair = (tile % across * (TILE_COLUMNS // 2) + tl.arange(0, TILE_COLUMNS // 2))[None, :]
    exists = (row < rows) & (pair < columns * (UNIT // 2))
    position = (position + row * (dst_row * (UNIT // 2)) + pair).to(tl.uint64)
    add_digest(sums, segment, low | (high << 32), position, exists)


@triton.jit
def _cast_kernel(  # noqa: C901 - one branch for each form
    out, owner, table, sums, FORMS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, ON_HOPPER: tl.constexpr, DIGEST: tl.constexpr,
):  # fmt: skip
    """Cast one tile per program.  Forms that the table lacks are not compiled."""
    program = tl.program_id(0)
    descriptor = load_descriptor(table + tl.load(owner + program).to(tl.int64) * FIELDS)
    form = descriptor[0]
    tile = program - descriptor[1]
    if FROM_BF16_WHOLE & FORMS:
        if form == FROM_BF16_WHOLE:
            if ON_HOPPER:
                quantize_pairs(descriptor, tile, out, sums, BLOCK_ROWS, BLOCK_COLUMNS, DIGEST)
            else:
                quantize_block_of(descriptor, tile, out, tl.bfloat16, 2, True, BLOCK_ROWS, BLOCK_COLUMNS, False)
    if FROM_BF16 & FORMS:
        if form == FROM_BF16:
            quantize_block_of(descriptor, tile, out, tl.bfloat16, 2, False, BLOCK_ROWS, BLOCK_COLUMNS, ON_HOPPER)
    if FROM_FP16_WHOLE & FORMS:
        if form == FROM_FP16_WHOLE:
            quantize_block_of(descriptor, tile, out, tl.float16, 2, True, BLOCK_ROWS, BLOCK_COLUMNS, ON_HOPPER)
    if FROM_FP16 & FORMS:
        if form == FROM_FP16:
            quantize_block_of(descriptor, tile, out, tl.float16, 2, False, BLOCK_ROWS, BLOCK_COLUMNS, ON_HOPPER)
    if FROM_FP32_WHOLE & FORMS:
        if form == FROM_FP32_WHOLE:
            quantize_block_of(descriptor, tile, out, tl.float32, 4, True, BLOCK_ROWS, BLOCK_COLUMNS, ON_HOPPER)
    if FROM_FP32 & FORMS:
        if form == FROM_FP32:
            quantize_block_of(descriptor, tile, out, tl.float32, 4, False, BLOCK_ROWS, BLOCK_COLUMNS, ON_HOPPER)
    if MOVES & FORMS:
        is_left = form <= MOVES
        if DIGEST:
            if form == WORDS:
                _copy_words(descriptor, tile, out, sums, TILE_ROWS, TILE_COLUMNS)
            is_left = is_left & (form != WORDS)
        if is_left:
            src = descriptor[5].to(tl.pointer_type(tl.uint8))
            move_tile(descriptor, tile, src, out + descriptor[8], FORMS, TILE_ROWS, TILE_COLUMNS, False)


class CastLaunch:
    """The table of one list of items, on their device or on one that can read them."""

    def __init__(
        self,
        items: Sequence[CastItem],
        out_dtype: torch.dtype,
        block: tuple[int, int],
        segments: Sequence[tuple[int, int]] | None = None,
        shape: CastShape | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.shape = shape or CastShape()
        self.out_dtype = out_dtype
        self.block = block
        self.device = device or items[0].source.device
        is_cuda = self.device.type == "cuda"
        self.on_hopper = is_cuda and torch.cuda.get_device_capability(self.device) >= (9, 0)
        self.in_torch: list[CastItem] = []
        """Items that no kernel covers: a rare dtype, or a block whose sides are no powers of two."""
        descriptors: list[list[int]] = []
        tiles: list[int] = []
        written: list[tuple[CastItem, list[list[int]]]] = []
        for item in items:
            rows, counts = self._quantized(item) if item.is_fp8 else self._moved(item)
            written.append((item, rows))
            descriptors += rows
            tiles += counts
        if segments is None:
            segments = [segment for item in items for segment in item.segments(out_dtype, block)]
        self.segments = segments
        self._apart = self._assign_segments(written)
        """Segments that are digested after they were written."""
        self._digest_apart: DigestLaunch | None = None
        self.forms = _few_masks(functools.reduce(operator.or_, (row[0] for row in descriptors), 0))
        if descriptors:
            table = torch.tensor(descriptors, dtype=torch.int64, device=self.device)
            self.owner, table[:, FIRST_TILE.value] = tile_index(tiles, self.device)
            self.table = table

    def run(self, out: Tensor) -> None:
        """Write all items into the bucket ``out`` (uint8)."""
        self._run(out, None)

    def run_with_digests(self, out: Tensor) -> Tensor:
        """Return digests, int64 ``[segments]``."""
        # One more, for what is in no segment.
        sums = torch.zeros(len(self.segments) + 1, dtype=torch.int64, device=self.device)
        self._run(out, sums)
        if self._apart:
            if self._digest_apart is None:
                offsets, lengths = zip(*(self.segments[index] for index in self._apart), strict=True)
                self._digest_apart = DigestLaunch(offsets, lengths, self.device)
                self._index_apart = torch.tensor(self._apart, device=self.device)
            sums[self._index_apart] = self._digest_apart.run(out)
        return sums[:-1]

    def _run(self, out: Tensor, sums: Tensor | None) -> None:
        if out.data_ptr() % VECTOR_BYTES:
            raise ValueError(f"the bucket starts at an address that is no multiple of {VECTOR_BYTES}")
        if self.forms:
            with on_device(self.device):
                _cast_kernel[(len(self.owner),)](
                    out,
                    self.owner,
                    self.table,
                    sums,
                    FORMS=self.forms,
                    TILE_ROWS=self.shape.rows,
                    TILE_COLUMNS=self.shape.columns,
                    BLOCK_ROWS=self.block[0],
                    BLOCK_COLUMNS=self.block[1],
                    ON_HOPPER=self.on_hopper,
                    DIGEST=sums is not None,
                    num_warps=self.shape.num_warps,
                    maxnreg=self.shape.max_registers,
                )
        for item in self.in_torch:
            run_in_torch(item, out, self.out_dtype, self.block)

    def _assign_segments(self, written: Sequence[tuple[CastItem, list[list[int]]]]) -> list[int]:
        """Tell the descriptors of each item where its digest goes; the segments that they do not digest as a whole."""
        usual = {WORDS.value, FROM_BF16_WHOLE.value} if self.on_hopper else {WORDS.value}
        order = sorted(range(len(self.segments)), key=self.segments.__getitem__)
        starts = [self.segments[index][0] for index in order]
        missing = [size for _, size in self.segments]
        for item, descriptors in written:
            begin, size = item.segments(self.out_dtype, self.block)[0]
            place = bisect.bisect_right(starts, begin) - 1
            first = begin - starts[place] if place >= 0 else 0
            is_inside = place >= 0 and first + size <= self.segments[order[place]][1] and first % DIGEST_BYTES == 0
            segment = order[place] if is_inside else len(self.segments)
            if is_inside and descriptors and all(row[FORM.value] in usual for row in descriptors):
                missing[segment] -= size
            for row in descriptors:
                if row[FORM.value] == WORDS.value:
                    row[LAST.value] = segment
                    row[POSITION.value] = (first + row[DST.value] - begin) // DIGEST_BYTES
                elif row[FORM.value] > MOVES.value:
                    row[LAST.value] += 2 * segment
                    row[POSITION.value] = first // DIGEST_BYTES
        return [index for index, size in enumerate(missing) if size]

    def _quantized(self, item: CastItem) -> tuple[list[list[int]], list[int]]:
        forms = FP8_FROM.get(item.source.dtype)
        size = item.source.element_size()
        stride = item.source.stride(0) if item.source.size(0) > 1 else 0
        is_plain = item.row_run >= item.rows
        run, run_stride = (ONE_RUN, 0) if is_plain else (item.row_run, item.run_stride)
        # In a block the kernel counts elements of the source with 32 bits.
        crossings = 0 if run % self.block[0] == 0 else self.block[0] // run + 1
        span = stride * (self.block[0] + crossings * run_stride)
        if forms is None or any(side & (side - 1) for side in self.block) or span >= 1 << 31:
            self.in_torch.append(item)
            return [], []
        assert item.scale_offset is not None  # checked by the table
        address = item.source.data_ptr()
        columns = item.columns
        # One byte an element is written, so rows of whole vectors are whole vectors at both sides.
        is_whole = is_aligned(address, stride * size, item.out_offset, columns)
        if is_whole:
            columns, stride = columns // VECTOR_BYTES, stride * size // VECTOR_BYTES
        down, across = num_blocks(item.rows, item.columns, self.block)
        # As quantize_block_of reads them.
        fields = [forms[is_whole].value, 0, across, item.rows, columns, address, stride, run, item.out_offset]
        fields.append(run_stride)
        return [[*fields, item.scale_offset, int(item.kind == "fp8_block_ue8m0"), 0]], [down * across]

    def _moved(self, item: CastItem) -> tuple[list[list[int]], list[int]]:
        from_dtype = item.source.dtype
        to_dtype = from_dtype if item.kind == "copy" else self.out_dtype
        if form_of(from_dtype, to_dtype) is None:
            self.in_torch.append(item)
            return [], []
        descriptors: list[list[int]] = []
        tiles: list[int] = []
        for matrix in _copies_of(item, to_dtype):
            rows, counts = move_descriptors(matrix, from_dtype, to_dtype, (self.shape.rows, self.shape.columns), 0)
            descriptors += rows
            tiles += counts
        return descriptors, tiles


def _few_masks(forms: int) -> int:
    """Return the forms to compile a kernel for: the usual ones too, so that most tables share one of two kernels."""
    if not forms:
        return 0
    return forms | WORDS.value | (0 if forms <= MOVES.value else FROM_BF16_WHOLE.value)


def _copies_of(item: CastItem, to_dtype: torch.dtype) -> list[Copy2D]:
    """Return the whole runs, and the run that is cut off at the end."""
    stride, columns = item.source.stride(0), item.columns
    run = min(item.row_run, item.rows)
    num_whole, rest = divmod(item.rows, run)
    size, to_size = item.source.element_size(), to_dtype.itemsize
    found: list[Copy2D] = []
    for first, shape in ((0, (num_whole, run, columns)), (num_whole, (1, rest, columns))):
        source = item.source.data_ptr() + first * item.run_stride * stride * size
        target = item.out_offset + first * run * columns * to_size
        source_strides = (item.run_stride * stride, stride, 1)
        found += matrices(shape, source, source_strides, size, target, (run * columns, columns, 1), to_size)
    return found
