"""Splits strided copies into the two-dimensional copies and tiles that the kernels process."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

WORD_BYTES = 4
VECTOR_BYTES = 16
"""The widest access of a GPU thread; used when addresses, row strides and row lengths are multiples of it."""
VECTOR_WORDS = VECTOR_BYTES // WORD_BYTES
LINE_WORDS = 512
"""Length of the rows into which one long run of words is split."""


@dataclass(frozen=True, slots=True)
class Copy2D:
    """A copy of a matrix of elements from a source to a destination."""

    src: int
    """Address, or offset, of element (0, 0), in bytes."""
    src_strides: tuple[int, int]
    """Strides in elements, from row to row and from column to column."""
    dst: int
    dst_strides: tuple[int, int]
    rows: int
    columns: int


def matrices(
    shape: Sequence[int],
    src: int,
    src_strides: Sequence[int],
    src_size: int,
    dst: int,
    dst_strides: Sequence[int],
    dst_size: int,
) -> Iterator[Copy2D]:
    """Split a strided copy of any number of dimensions into as few matrices as possible.

    Dimensions that are contiguous with each other on both sides are merged.  Of the rest, the two innermost of the
    destination form a matrix, and the others are iterated over.

    Args:
        src, dst: address or offset of the first element, in bytes.
        src_size, dst_size: bytes per element.
    """
    if math.prod(shape) == 0:
        return
    axes = [axis for axis in zip(shape, src_strides, dst_strides, strict=True) if axis[0] > 1]
    axes.sort(key=lambda axis: axis[2], reverse=True)
    merged: list[tuple[int, int, int]] = []
    for size, src_stride, dst_stride in axes:
        if merged and merged[-1][1] == size * src_stride and merged[-1][2] == size * dst_stride:
            size *= merged.pop()[0]
        merged.append((size, src_stride, dst_stride))
    while len(merged) < 2:
        # The stride of a dimension of size one is never used; zero counts as aligned.
        merged.insert(0, (1, 0, 0)) if merged else merged.append((1, 1, 1))
    *outer, (rows, src_row, dst_row), (columns, src_column, dst_column) = merged
    for index in itertools.product(*(range(size) for size, _, _ in outer)):
        yield Copy2D(
            src + src_size * sum(i * stride for i, (_, stride, _) in zip(index, outer)),
            (src_row, src_column),
            dst + dst_size * sum(i * stride for i, (_, _, stride) in zip(index, outer)),
            (dst_row, dst_column),
            rows,
            columns,
        )


def in_words(matrix: Copy2D, size: int) -> list[Copy2D] | None:
    """View the same bytes as matrices of four-byte words whose rows are vector-aligned on both sides.

    Args:
        matrix: a copy between elements of the same dtype.
        size: bytes per element.

    Returns:
        None if the rows are not contiguous or not aligned.
    """
    if matrix.src_strides[1] != 1 or matrix.dst_strides[1] != 1:
        return None
    in_bytes = [matrix.columns * size, matrix.src_strides[0] * size, matrix.dst_strides[0] * size]
    if not is_aligned(matrix.src, matrix.dst, *in_bytes):
        return None
    columns, src_row, dst_row = (value // WORD_BYTES for value in in_bytes)
    words = Copy2D(matrix.src, (src_row, 1), matrix.dst, (dst_row, 1), matrix.rows, columns)
    if words.rows > 1 or columns <= LINE_WORDS:
        return [words]
    # One long run: split it into rows of LINE_WORDS, and a remainder.
    lines, rest = divmod(columns, LINE_WORDS)
    done = lines * LINE_WORDS
    whole = Copy2D(words.src, (LINE_WORDS, 1), words.dst, (LINE_WORDS, 1), lines, LINE_WORDS)
    if not rest:
        return [whole]
    return [whole, replace(words, src=words.src + WORD_BYTES * done, dst=words.dst + WORD_BYTES * done, columns=rest)]


def as_lines(matrix: Copy2D, src_size: int, dst_size: int) -> list[Copy2D]:
    """View a matrix of one long row as a matrix of several rows, which fill tiles better."""
    lines, rest = divmod(matrix.columns, LINE_WORDS)
    if matrix.rows > 1 or lines < 2:
        return [matrix]
    src_column, dst_column = matrix.src_strides[1], matrix.dst_strides[1]
    whole = replace(
        matrix,
        src_strides=(LINE_WORDS * src_column, src_column),
        dst_strides=(LINE_WORDS * dst_column, dst_column),
        rows=lines,
        columns=LINE_WORDS,
    )
    tail = replace(
        matrix,
        src=matrix.src + lines * LINE_WORDS * src_column * src_size,
        dst=matrix.dst + lines * LINE_WORDS * dst_column * dst_size,
        columns=rest,
    )
    return [whole, tail] if rest else [whole]


def is_aligned(*num_bytes: int) -> bool:
    """Return True if all values are multiples of ``VECTOR_BYTES``."""
    return all(value % VECTOR_BYTES == 0 for value in num_bytes)


def tile_index(tiles: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return which descriptor each program works on.

    Returns:
        int32 ``[sum(tiles)]``, the descriptor of every tile; and int64 ``[descriptors]``, the first tile of each
        descriptor.
    """
    counts = torch.tensor(tiles, dtype=torch.int64)
    owner = torch.repeat_interleave(torch.arange(len(counts), dtype=torch.int32), counts)
    return owner.to(device), (counts.cumsum(0) - counts).to(device)
