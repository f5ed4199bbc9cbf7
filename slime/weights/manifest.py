"""What a push of weights consists of: which tensors, in which buckets, where in each bucket.

The manifest is made once for a layout and sent ahead of the bytes; the buckets themselves are flat.  A tensor may come
in several pieces (a trainer rank sends the slices that it holds), each a rectangle of the whole tensor, stored
row-major at its offset.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch

from slime.utils.errors import WeightSyncError
from slime.weights.named_tensors import dtype_name

ALIGNMENT = 256
"""Pieces start at multiples of this many bytes, so that every kernel may read them in its widest words."""


def align(offset: int) -> int:
    """The next offset at which a piece may start."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class Piece:
    """A rectangle of one HF tensor, in a bucket."""

    name: str
    """HF name of the whole tensor."""
    offset: int
    """First byte in the bucket; a multiple of :data:`ALIGNMENT`."""
    start: tuple[int, ...]
    """First index in each dimension of the whole tensor."""
    shape: tuple[int, ...]
    """Extent in each dimension."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One HF tensor of the push."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """As SGLang spells it: ``bfloat16``, ``float8_e4m3fn``."""

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.torch_dtype.itemsize


@dataclass(frozen=True, slots=True)
class BucketEntry:
    """One flat buffer of the push."""

    num_bytes: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Manifest:
    """All tensors and buckets of a push.

    Raises:
        WeightSyncError: a piece lies outside its tensor or its bucket, or names a tensor that is not listed; the
            pieces of a tensor do not add up to it.
    """

    tensors: tuple[TensorEntry, ...]
    buckets: tuple[BucketEntry, ...]

    def __post_init__(self) -> None:
        entries = {tensor.name: tensor for tensor in self.tensors}
        covered = dict.fromkeys(entries, 0)
        for index, bucket in enumerate(self.buckets):
            for piece in bucket.pieces:
                entry = entries.get(piece.name)
                if entry is None:
                    raise WeightSyncError(f"bucket {index} holds a piece of {piece.name}, which the manifest lacks")
                ends = [begin + extent for begin, extent in zip(piece.start, piece.shape, strict=True)]
                is_inside = len(ends) == len(entry.shape) and all(
                    end <= size for end, size in zip(ends, entry.shape, strict=True)
                )
                if not is_inside:
                    raise WeightSyncError(
                        f"{piece.name} has the shape {list(entry.shape)}; bucket {index} holds the piece "
                        f"{list(piece.shape)} at {list(piece.start)}"
                    )
                size = math.prod(piece.shape)
                if piece.offset + size * entry.torch_dtype.itemsize > bucket.num_bytes:
                    raise WeightSyncError(
                        f"the piece of {piece.name} at byte {piece.offset} ends behind bucket {index} of "
                        f"{bucket.num_bytes} bytes"
                    )
                covered[piece.name] += size
        for tensor in self.tensors:
            if covered[tensor.name] != math.prod(tensor.shape):
                raise WeightSyncError(
                    f"the pieces of {tensor.name} have {covered[tensor.name]} elements together; its shape is "
                    f"{list(tensor.shape)}"
                )

    @cached_property
    def id(self) -> str:
        """Name of this layout: equal for equal content."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    @cached_property
    def by_name(self) -> dict[str, TensorEntry]:
        return {tensor.name: tensor for tensor in self.tensors}

    def segments(self, bucket_index: int) -> list[tuple[int, int]]:
        """First byte and number of bytes of each piece of a bucket, which its digest is taken over in this order."""
        return [
            (piece.offset, math.prod(piece.shape) * self.by_name[piece.name].torch_dtype.itemsize)
            for piece in self.buckets[bucket_index].pieces
        ]

    def to_json(self) -> str:
        """The compact text that :meth:`from_json` reads."""
        return json.dumps(
            {
                "tensors": [[t.name, t.shape, t.dtype] for t in self.tensors],
                "buckets": [
                    [bucket.num_bytes, [[p.name, p.offset, p.start, p.shape] for p in bucket.pieces]]
                    for bucket in self.buckets
                ],
            },
            separators=(",", ":"),
        )

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """The manifest that :meth:`to_json` wrote."""
        content = json.loads(text)
        return cls(
            tensors=tuple(TensorEntry(name, tuple(shape), dtype) for name, shape, dtype in content["tensors"]),
            buckets=tuple(
                BucketEntry(
                    size,
                    tuple(Piece(name, offset, tuple(start), tuple(shape)) for name, offset, start, shape in pieces),
                )
                for size, pieces in content["buckets"]
            ),
        )


def pack_whole(tensors: Iterable[tuple[str, tuple[int, ...], torch.dtype]]) -> tuple[list[TensorEntry], BucketEntry]:
    """A bucket of whole tensors, one behind the other."""
    entries: list[TensorEntry] = []
    pieces: list[Piece] = []
    end = 0
    for name, shape, dtype in tensors:
        entry = TensorEntry(name, tuple(shape), dtype_name(dtype))
        start = align(end)
        entries.append(entry)
        pieces.append(Piece(name, start, (0,) * len(shape), tuple(shape)))
        end = start + entry.num_bytes
    return entries, BucketEntry(end, tuple(pieces))
