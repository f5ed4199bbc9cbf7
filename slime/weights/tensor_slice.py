"""Rectangular slices of tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

Ints = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """A rectangular slice of a tensor, described like the chunks in ``torch.distributed.checkpoint``.

    Offsets and sizes have one entry per dimension and count elements.
    """

    offsets: Ints
    """First index in each dimension."""
    sizes: Ints
    """Extent in each dimension."""

    @classmethod
    def whole(cls, shape: Sequence[int]) -> TensorSlice:
        """Return the slice that covers a whole tensor of ``shape``."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def num_elements(self) -> int:
        """Product of the sizes; 1 for a scalar."""
        return math.prod(self.sizes)

    @property
    def index(self) -> tuple[slice, ...]:
        """The slice as a tensor index: ``tensor[s.index]``."""
        return tuple(slice(begin, begin + size) for begin, size in zip(self.offsets, self.sizes, strict=True))

    def rows(self, begin: int, end: int) -> TensorSlice:
        """Return rows ``begin`` (inclusive) to ``end`` (exclusive) of the slice, counted from its first row."""
        return TensorSlice((self.offsets[0] + begin, *self.offsets[1:]), (end - begin, *self.sizes[1:]))

    def in_blocks(self, block: Sequence[int]) -> TensorSlice:
        """Return the slice in units of blocks, ``block`` elements per dimension.  The last block may be partial."""
        offsets = tuple(begin // step for begin, step in zip(self.offsets, block, strict=True))
        return TensorSlice(offsets, tuple(-(-size // step) for size, step in zip(self.sizes, block, strict=True)))

    def of(self, tensor: Tensor) -> Tensor:
        """Return a view of this slice of the whole ``tensor``."""
        return tensor[self.index]

    def is_within(self, shape: Sequence[int]) -> bool:
        """Return whether the slice lies within a tensor of this shape."""
        if self.sizes == shape and not any(self.offsets):
            return True
        return len(self.sizes) == len(shape) and all(
            begin >= 0 and begin + size <= extent
            for begin, size, extent in zip(self.offsets, self.sizes, shape, strict=True)
        )
