"""Arithmetic of strided copies: which elements of one piece of memory go where in another.

A copy of a slice of a tensor into a slice of another is five lists of integers, and so are all copies that model
loaders make out of narrow, chunk, transpose, view and cat.  Here they are cut where a rectangle ends.  No tensors.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

Ints = tuple[int, ...]

MAX_CUTS = 4096
"""Copies that one copy may fall into when a rectangle cuts through interleaved rows."""


class NotRectangularError(Exception):
    """A view that is no rectangle of its tensor: diagonals, overlaps, rows that wrap around."""


@dataclass(frozen=True, slots=True)
class StridedCopy:
    """Element ``i`` of the shape goes from ``from_offset + i . from_strides`` to ``to_offset + i . to_strides``.

    Offsets and strides count elements; a stride of zero in ``from_strides`` repeats an element.
    """

    shape: Ints
    to_offset: int
    to_strides: Ints
    from_offset: int
    from_strides: Ints

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Layout:
    """How a tensor lies in memory, from its first element on."""

    shape: Ints
    strides: Ints

    @classmethod
    def row_major(cls, shape: Sequence[int]) -> Layout:
        return cls(tuple(shape), row_major_strides(shape))

    def coordinates(self, offset: int) -> Ints:
        """Index of the element at ``offset``.

        Raises:
            NotRectangularError: no element lies there.
        """
        result = [0] * len(self.shape)
        for dim in sorted(range(len(self.shape)), key=lambda d: -self.strides[d]):
            if self.shape[dim] > 1:
                result[dim], offset = divmod(offset, self.strides[dim])
        if offset or any(value >= size for value, size in zip(result, self.shape, strict=True)):
            raise NotRectangularError
        return tuple(result)

    def dim_of(self, stride: int) -> int:
        """The dimension along which memory positions ``stride`` apart lie."""
        fitting = [
            d for d, own in enumerate(self.strides) if self.shape[d] > 1 and own <= stride and stride % own == 0
        ]
        if not fitting:
            raise NotRectangularError
        return max(fitting, key=lambda d: self.strides[d])


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle of a tensor, and how its own elements lie in memory."""

    start: Ints
    shape: Ints
    offset: int
    """Of its first element."""
    strides: Ints

    @classmethod
    def row_major(cls, start: Sequence[int], shape: Sequence[int]) -> Box:
        """Elements packed one behind the other."""
        return cls(tuple(start), tuple(shape), 0, row_major_strides(shape))


def row_major_strides(shape: Sequence[int]) -> Ints:
    """Strides of a contiguous tensor."""
    strides, stride = [], 1
    for size in reversed(shape):
        strides.append(stride)
        stride *= max(size, 1)
    return tuple(reversed(strides))


def squeezed(copy: StridedCopy) -> StridedCopy:
    """The same copy without dimensions of one element."""
    kept = [d for d, size in enumerate(copy.shape) if size != 1]
    return StridedCopy(
        tuple(copy.shape[d] for d in kept),
        copy.to_offset,
        tuple(copy.to_strides[d] for d in kept),
        copy.from_offset,
        tuple(copy.from_strides[d] for d in kept),
    )


def merged(copy: StridedCopy) -> StridedCopy:
    """The same copy in as few dimensions as the strides of both sides allow."""
    copy = squeezed(copy)
    shape, to, frm = list(copy.shape), list(copy.to_strides), list(copy.from_strides)
    dim = len(shape) - 2
    while dim >= 0:
        size = shape[dim + 1]
        if to[dim] == size * to[dim + 1] and frm[dim] == size * frm[dim + 1]:
            shape[dim] *= size
            to[dim], frm[dim] = to[dim + 1], frm[dim + 1]
            del shape[dim + 1], to[dim + 1], frm[dim + 1]
        dim -= 1
    return StridedCopy(tuple(shape), copy.to_offset, tuple(to), copy.from_offset, tuple(frm))


def swapped(copy: StridedCopy) -> StridedCopy:
    """The copy back."""
    return StridedCopy(copy.shape, copy.from_offset, copy.from_strides, copy.to_offset, copy.to_strides)


def clip(copy: StridedCopy, whole: Layout, box: Box) -> list[StridedCopy]:
    """The part of ``copy`` that reads from ``box``, reading it where the box's own elements lie.

    Args:
        copy: reads from a tensor that lies as ``whole``.
        whole: its layout.
        box: a rectangle of the tensor, kept elsewhere.

    Raises:
        NotRectangularError: the copy reads something other than rectangles.
    """
    copy, start, dims = _along_dims(squeezed(copy), whole)
    return [
        cut
        for single, first in _one_axis_a_dim(copy, start, dims, whole)
        if (cut := _cut(single, first, whole, box)) is not None
    ]


def box_written(copy: StridedCopy, whole: Layout) -> Box:
    """The rectangle of a tensor that ``copy`` writes, lying where the copy reads from.

    Raises:
        NotRectangularError: it writes something other than one rectangle.
    """
    back, start, dims = _along_dims(swapped(squeezed(copy)), whole)
    shape, strides = [1] * len(whole.shape), [0] * len(whole.shape)
    order = sorted(range(len(dims)), key=lambda axis: back.from_strides[axis])
    for axis in order:
        dim, size = dims[axis], back.shape[axis]
        if dim is None:
            raise NotRectangularError  # elements written more than once
        step = back.from_strides[axis] // whole.strides[dim]
        if shape[dim] == 1 and step == 1:
            shape[dim], strides[dim] = size, back.to_strides[axis]
        elif step == shape[dim] and back.to_strides[axis] == shape[dim] * strides[dim]:
            shape[dim] *= size
        else:
            raise NotRectangularError
    return Box(start, tuple(shape), copy.from_offset, tuple(strides))


def _along_dims(copy: StridedCopy, whole: Layout) -> tuple[StridedCopy, Ints, list[int | None]]:
    """The copy with every axis along one dimension of what it reads: (copy, first index, dimension of each axis).

    An axis that runs over the end of a dimension into the next outer one (a flattened view) is split.  The dimension
    of a repeated axis is None.
    """
    start = whole.coordinates(copy.from_offset)
    shape, to, frm = list(copy.shape), list(copy.to_strides), list(copy.from_strides)
    dims: list[int | None] = []
    axis = 0
    while axis < len(shape):
        if frm[axis] == 0:
            dims.append(None)
            axis += 1
            continue
        dim = whole.dim_of(frm[axis])
        step = frm[axis] // whole.strides[dim]
        if start[dim] + (shape[axis] - 1) * step < whole.shape[dim]:
            dims.append(dim)
            axis += 1
            continue
        inner, rest = divmod(whole.shape[dim], step)
        if rest or start[dim] or shape[axis] % inner or inner in (1, shape[axis]):
            raise NotRectangularError
        shape[axis : axis + 1] = [shape[axis] // inner, inner]
        to[axis : axis + 1] = [to[axis] * inner, to[axis]]
        frm[axis : axis + 1] = [frm[axis] * inner, frm[axis]]
    return StridedCopy(tuple(shape), copy.to_offset, tuple(to), copy.from_offset, tuple(frm)), start, dims


def _one_axis_a_dim(
    copy: StridedCopy, start: Ints, dims: list[int | None], whole: Layout
) -> list[tuple[StridedCopy, Ints]]:
    """Copies of which no two axes run along the same dimension: the outer ones are written out."""
    outer = []
    for axis, dim in enumerate(dims):
        rivals = [a for a, other in enumerate(dims) if other == dim and a != axis and dim is not None]
        if any(copy.from_strides[rival] < copy.from_strides[axis] for rival in rivals):
            outer.append(axis)
    if not outer:
        return [(copy, start)]
    if math.prod(copy.shape[axis] for axis in outer) > MAX_CUTS:
        raise NotRectangularError
    kept = [axis for axis in range(len(dims)) if axis not in outer]
    result = []
    for indices in itertools.product(*(range(copy.shape[axis]) for axis in outer)):
        from_offset = copy.from_offset + sum(
            i * copy.from_strides[axis] for i, axis in zip(indices, outer, strict=True)
        )
        to_offset = copy.to_offset + sum(i * copy.to_strides[axis] for i, axis in zip(indices, outer, strict=True))
        single = StridedCopy(
            tuple(copy.shape[axis] for axis in kept),
            to_offset,
            tuple(copy.to_strides[axis] for axis in kept),
            from_offset,
            tuple(copy.from_strides[axis] for axis in kept),
        )
        result.append((single, whole.coordinates(from_offset)))
    return result


def _cut(copy: StridedCopy, start: Ints, whole: Layout, box: Box) -> StridedCopy | None:
    """The part inside ``box`` of a copy with one axis a dimension; None when there is none."""
    first = list(start)
    shape, frm, to_offset = list(copy.shape), [0] * len(copy.shape), copy.to_offset
    for axis, stride in enumerate(copy.from_strides):
        if stride == 0:
            continue
        dim = whole.dim_of(stride)
        step = stride // whole.strides[dim]
        low = max(0, -(-(box.start[dim] - start[dim]) // step))
        high = min(shape[axis], -(-(box.start[dim] + box.shape[dim] - start[dim]) // step))
        if low >= high:
            return None
        first[dim] += low * step
        to_offset += low * copy.to_strides[axis]
        shape[axis], frm[axis] = high - low, step * box.strides[dim]
    from_offset = box.offset
    for dim, index in enumerate(first):
        if not box.start[dim] <= index < box.start[dim] + box.shape[dim]:
            return None
        from_offset += (index - box.start[dim]) * box.strides[dim]
    return StridedCopy(tuple(shape), to_offset, copy.to_strides, from_offset, tuple(frm))
