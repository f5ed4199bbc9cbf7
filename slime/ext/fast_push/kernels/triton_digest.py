"""The kernel of ``DigestTable``: sums of mixed 64-bit words, for many segments in one launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from slime.ext.fast_push.kernels.copy_2d import is_aligned, tile_index
from slime.ext.fast_push.kernels.triton_copy import on_device
from slime.weights import digest

GOLDEN = tl.constexpr(digest.GOLDEN)
MULTIPLIER_1 = tl.constexpr(digest.MULTIPLIER_1)
MULTIPLIER_2 = tl.constexpr(digest.MULTIPLIER_2)
WORD_BYTES = tl.constexpr(digest.WORD_BYTES)
TILE_WORDS, NUM_WARPS = 2048, 4
"""64-bit words per program, and its warps: the fastest on an H100."""


@triton.jit
def mix(word, position):
    """Compute ``slime.weights.digest.mix`` for unsigned 64-bit words and positions."""
    value = word + (position + 1) * GOLDEN
    value = (value ^ (value >> 30)) * MULTIPLIER_1
    value = (value ^ (value >> 27)) * MULTIPLIER_2
    return value ^ (value >> 31)


@triton.jit
def add_digest(sums, segment, word, position, exists):
    """Add a tile of words to the digest of a segment.  Words and positions are uint64, all tiles of one shape."""
    total = tl.sum(tl.where(exists, mix(word, position), 0))
    tl.atomic_add(sums + segment, total.to(tl.int64, bitcast=True))


@triton.jit
def _digest_kernel(flat, owner, segments, sums, UNIT: tl.constexpr, TILE: tl.constexpr):
    """Digest one tile of one segment per program.  Row of ``segments``: first tile, offset in UNIT bytes, bytes."""
    program = tl.program_id(0)
    segment = tl.load(owner + program)
    fields = segments + segment.to(tl.int64) * 3
    begin = (program - tl.load(fields)) * TILE
    data = flat + tl.load(fields + 1) * UNIT
    num_bytes = tl.load(fields + 2)
    # Pairs of words, for the widest load.
    num_paired = num_bytes // (2 * WORD_BYTES) * 2
    index = begin + tl.arange(0, TILE)
    words = tl.multiple_of(data.to(tl.pointer_type(tl.uint64), bitcast=True), UNIT)
    is_paired = index < num_paired
    word = tl.load(words + index, mask=is_paired, other=0)
    total = tl.sum(tl.where(is_paired, mix(word, index.to(tl.uint64)), 0))
    if begin + TILE > num_paired:
        # The bytes after the last pair, padded with zeros.
        rest_word = num_paired + tl.arange(0, 2)
        byte = tl.arange(0, WORD_BYTES)
        where = rest_word[:, None] * WORD_BYTES + byte[None, :]
        rest = tl.load(data + where, mask=where < num_bytes, other=0).to(tl.uint64)
        rest = tl.sum(rest << (8 * byte)[None, :].to(tl.uint64), axis=1)
        total += tl.sum(tl.where(rest_word * WORD_BYTES < num_bytes, mix(rest, rest_word.to(tl.uint64)), 0))
    tl.atomic_add(sums + segment, total.to(tl.int64, bitcast=True))


class DigestLaunch:
    """A ``DigestTable``'s segments, on a device."""

    def __init__(self, offsets: Sequence[int], lengths: Sequence[int], device: torch.device) -> None:
        if any(offset % WORD_BYTES.value for offset in offsets):
            raise ValueError(
                f"segments must start at multiples of {WORD_BYTES.value} bytes; offsets are {list(offsets)}"
            )
        self.device = device
        self.unit = 16 if is_aligned(*offsets) else WORD_BYTES.value
        tiles = [-(-length // (TILE_WORDS * WORD_BYTES.value)) for length in lengths]
        segments = torch.tensor(
            [[0, offset // self.unit, length] for offset, length in zip(offsets, lengths)],
            dtype=torch.int64,
            device=device,
        )
        self.owner, segments[:, 0] = tile_index(tiles, device)
        self.segments = segments

    def run(self, flat: Tensor) -> Tensor:
        if flat.data_ptr() % self.unit:
            raise ValueError(f"the bucket's address is not a multiple of {self.unit}")
        sums = torch.zeros(len(self.segments), dtype=torch.int64, device=self.device)
        if len(self.owner):
            with on_device(self.device):
                _digest_kernel[(len(self.owner),)](
                    flat,
                    self.owner,
                    self.segments,
                    sums,
                    UNIT=self.unit,
                    TILE=TILE_WORDS,
                    num_warps=NUM_WARPS,
                )
        return sums
