"""Arithmetic of strided copies: which elements of one memory go where in another.

A copy between slices of two tensors is described by a shape, two offsets and two lists of strides, and so are all
copies that model loaders build from narrow, chunk, transpose, view and cat.  This module clips copies to slices.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from slime.weights.tensor_slice import Ints, TensorSlice

MAX_CUTS = 4096
"""Maximum number of copies into which one may split when a slice cuts through interleaved rows."""


class NotRectangularError(Exception):
    """A view is not a slice of its tensor: diagonals, overlaps, rows that wrap around."""


@dataclass(frozen=True, slots=True)
class StridedCopy:
    """Copies index ``i`` of the shape from ``from_offset + i . from_strides`` to ``to_offset + i . to_strides``.

    Offsets and strides count elements; a stride of zero in ``from_strides`` repeats an element.
    """

    shape: Ints
    to_offset: int
    to_strides: Ints
    from_offset: int
    from_strides: Ints

    @property
    def num_elements(self) -> int:
        """Number of elements copied."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class StridedSlice:
    """A slice of a tensor and its memory layout; a whole tensor is a slice of itself."""

    slice: TensorSlice
    offset: int
    """Position of its first element, in elements."""
    strides: Ints

    @classmethod
    def whole(cls, shape: Sequence[int], strides: Sequence[int] | None = None) -> StridedSlice:
        """Return a whole tensor at offset 0; row-major without ``strides``."""
        return cls(TensorSlice.whole(shape), 0, row_major_strides(shape) if strides is None else tuple(strides))

    @classmethod
    def packed(cls, part: TensorSlice) -> StridedSlice:
        """Return a slice stored on its own, row-major at offset 0."""
        return cls(part, 0, row_major_strides(part.sizes))

    @property
    def shape(self) -> Ints:
        """Sizes of the slice."""
        return self.slice.sizes

    def coordinates(self, offset: int) -> Ints:
        """Return the index of a whole tensor's element at ``offset``.

        Raises:
            NotRectangularError: the slice has no element there.
        """
        result = [0] * len(self.shape)
        for dim in sorted(range(len(self.shape)), key=lambda d: -self.strides[d]):
            if self.shape[dim] > 1:
                result[dim], offset = divmod(offset, self.strides[dim])
        if offset or any(value >= size for value, size in zip(result, self.shape, strict=True)):
            raise NotRectangularError
        return tuple(result)

    def dim_of(self, stride: int) -> int:
        """Return the dimension along which elements ``stride`` apart in memory lie."""
        fitting = [
            d for d, own in enumerate(self.strides) if self.shape[d] > 1 and own <= stride and stride % own == 0
        ]
        if not fitting:
            raise NotRectangularError
        return max(fitting, key=lambda d: self.strides[d])


def row_major_strides(shape: Sequence[int]) -> Ints:
    """Return the strides of a contiguous tensor."""
    strides, stride = [], 1
    for size in reversed(shape):
        strides.append(stride)
        stride *= max(size, 1)
    return tuple(reversed(strides))


def squeezed(copy: StridedCopy) -> StridedCopy:
    """Return the same copy without dimensions of size 1."""
    kept = [d for d, size in enumerate(copy.shape) if size != 1]
    return StridedCopy(
        tuple(copy.shape[d] for d in kept),
        copy.to_offset,
        tuple(copy.to_strides[d] for d in kept),
        copy.from_offset,
        tuple(copy.from_strides[d] for d in kept),
    )


def merged(copy: StridedCopy) -> StridedCopy:
    """Return the same copy with as few dimensions as both sides' strides allow."""
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
    """Return the copy in the opposite direction."""
    return StridedCopy(copy.shape, copy.from_offset, copy.from_strides, copy.to_offset, copy.to_strides)


def clip(copy: StridedCopy, whole: StridedSlice, part: StridedSlice) -> list[StridedCopy]:
    """Restrict ``copy`` to the elements in ``part``, reading from the memory of ``part``.

    Args:
        copy: reads from a tensor with the layout of ``whole``.
        whole: the whole tensor.
        part: a slice of the tensor, with its own memory layout.

    Raises:
        NotRectangularError: the copy reads something other than slices.
    """
    copy, start, dims = _along_dims(squeezed(copy), whole)
    return [
        clipped
        for single, first in _one_axis_a_dim(copy, start, dims, whole)
        if (clipped := _clip_one(single, first, whole, part)) is not None
    ]


def slice_written(copy: StridedCopy, whole: StridedSlice) -> StridedSlice:
    """Return the slice of tensor ``whole`` that ``copy`` writes, with the memory layout that the copy reads from.

    Raises:
        NotRectangularError: the copy writes something other than one slice.
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
    return StridedSlice(TensorSlice(start, tuple(shape)), copy.from_offset, tuple(strides))


def _along_dims(copy: StridedCopy, whole: StridedSlice) -> tuple[StridedCopy, Ints, list[int | None]]:
    """Split axes so that each runs along one dimension of the source; return (copy, first index, dimension per axis).

    An axis is split if it runs past the end of a dimension into the next outer one (a flattened view).  The dimension
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
    copy: StridedCopy, start: Ints, dims: list[int | None], whole: StridedSlice
) -> list[tuple[StridedCopy, Ints]]:
    """Unroll outer axes until no two axes of a copy run along the same dimension."""
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


def _clip_one(copy: StridedCopy, start: Ints, whole: StridedSlice, part: StridedSlice) -> StridedCopy | None:
    """Restrict a copy with at most one axis per dimension to ``part``; None if nothing is left."""
    offsets, sizes = part.slice.offsets, part.slice.sizes
    first = list(start)
    shape, frm, to_offset = list(copy.shape), [0] * len(copy.shape), copy.to_offset
    for axis, stride in enumerate(copy.from_strides):
        if stride == 0:
            continue
        dim = whole.dim_of(stride)
        step = stride // whole.strides[dim]
        low = max(0, -(-(offsets[dim] - start[dim]) // step))
        high = min(shape[axis], -(-(offsets[dim] + sizes[dim] - start[dim]) // step))
        if low >= high:
            return None
        first[dim] += low * step
        to_offset += low * copy.to_strides[axis]
        shape[axis], frm[axis] = high - low, step * part.strides[dim]
    from_offset = part.offset
    for dim, index in enumerate(first):
        if not offsets[dim] <= index < offsets[dim] + sizes[dim]:
            return None
        from_offset += (index - offsets[dim]) * part.strides[dim]
    return StridedCopy(tuple(shape), to_offset, copy.to_strides, from_offset, tuple(frm))
