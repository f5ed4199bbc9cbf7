"""The contents of a weight push: tensors, buckets, and the location of each slice.

A manifest is made once per layout and sent ahead of the bytes; the buckets themselves are flat.  A tensor may be sent
in several slices (a trainer rank sends the ones it holds), each stored row-major at its offset in the bucket.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from slime.utils.errors import WeightSyncError
from slime.weights.named_tensors import dtype_name
from slime.weights.tensor_slice import TensorSlice

_Item = TypeVar("_Item", bound=Hashable)
ALIGNMENT = 256
"""Slices start at multiples of this many bytes, so that kernels can use their widest loads."""


def align(offset: int) -> int:
    """Round up to the next offset at which a slice may start."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class BucketSlice:
    """A slice of one HF tensor, in a bucket."""

    name: str
    """HF name of the whole tensor."""
    offset: int
    """First byte in the bucket; a multiple of :data:`ALIGNMENT`."""
    slice: TensorSlice

    def view(self, flat: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a view of the slice in bucket ``flat`` (uint8), with the slice's sizes."""
        size = self.slice.num_elements * dtype.itemsize
        return flat[self.offset : self.offset + size].view(dtype).view(self.slice.sizes)


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One HF tensor of the push."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """Name in SGLang: ``bfloat16``, ``float8_e4m3fn``."""

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype in torch."""
        return getattr(torch, self.dtype)

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.torch_dtype.itemsize


@dataclass(frozen=True, slots=True)
class BucketEntry:
    """One flat buffer of the push."""

    num_bytes: int
    slices: tuple[BucketSlice, ...]
    is_constant: bool = False
    """True if no training step changes its tensors; a push omits it if every engine holds it from an earlier push."""


@dataclass(frozen=True)
class Manifest:
    """All tensors and buckets of a push.

    If one slice of a tensor is in a constant bucket, all of its slices are.

    Raises:
        WeightSyncError: a slice is outside its tensor or bucket, or names an unlisted tensor; or a tensor's slices do
            not have as many elements as the tensor.
    """

    tensors: tuple[TensorEntry, ...]
    buckets: tuple[BucketEntry, ...]
    kept: tuple[TensorEntry, ...] = ()
    """Tensors that are not pushed: untrained parts, which engines keep as loaded from the checkpoint."""

    def __post_init__(self) -> None:
        entries = {tensor.name: tensor for tensor in self.tensors}
        covered = dict.fromkeys(entries, 0)
        for index, bucket in enumerate(self.buckets):
            for item in bucket.slices:
                entry, part = entries.get(item.name), item.slice
                if entry is None:
                    raise WeightSyncError(f"bucket {index} holds a slice of {item.name}, which the manifest lacks")
                num_elements = part.num_elements
                if not part.is_within(entry.shape):
                    raise WeightSyncError(
                        f"{item.name} has the shape {list(entry.shape)}; bucket {index} holds the slice "
                        f"{list(part.sizes)} at {list(part.offsets)}"
                    )
                if item.offset + num_elements * entry.torch_dtype.itemsize > bucket.num_bytes:
                    raise WeightSyncError(
                        f"the slice of {item.name} at byte {item.offset} ends beyond bucket {index} of "
                        f"{bucket.num_bytes} bytes"
                    )
                covered[item.name] += num_elements
        for tensor in self.tensors:
            if covered[tensor.name] != math.prod(tensor.shape):
                raise WeightSyncError(
                    f"the slices of {tensor.name} have {covered[tensor.name]} elements together; its shape is "
                    f"{list(tensor.shape)}"
                )

    @cached_property
    def id(self) -> str:
        """Identifier of this layout; equal content has equal ids."""
        return _digest(self.to_json())

    @cached_property
    def by_name(self) -> dict[str, TensorEntry]:
        """Tensor entries by HF name."""
        return {tensor.name: tensor for tensor in self.tensors}

    @cached_property
    def constants(self) -> tuple[int, ...]:
        """Indices of the constant buckets; a push sends or leaves out all of them."""
        return tuple(index for index, bucket in enumerate(self.buckets) if bucket.is_constant)

    def segments(self, bucket_index: int) -> list[tuple[int, int]]:
        """Return first byte and number of bytes of each slice of a bucket, in digest order."""
        return [
            (item.offset, item.slice.num_elements * self.by_name[item.name].torch_dtype.itemsize)
            for item in self.buckets[bucket_index].slices
        ]

    def to_json(self) -> str:
        """Serialize compactly for :meth:`from_json`, in columns, because layers and experts are alike."""
        kinds, kind_of = _numbered((tensor.shape, tensor.dtype) for tensor in (*self.tensors, *self.kept))
        parts, part_of = _numbered(item.slice for bucket in self.buckets for item in bucket.slices)
        positions = {tensor.name: position for position, tensor in enumerate(self.tensors)}
        rest = iter(part_of)
        content: dict[str, Any] = {
            "kinds": kinds,
            "slices": [(part.offsets, part.sizes) for part in parts],
            "tensors": ([tensor.name for tensor in self.tensors], kind_of[: len(self.tensors)]),
            "buckets": [
                (
                    bucket.num_bytes,
                    [positions[item.name] for item in bucket.slices],
                    [item.offset for item in bucket.slices],
                    list(itertools.islice(rest, len(bucket.slices))),
                )
                for bucket in self.buckets
            ],
        }
        if self.kept:
            content["kept"] = ([tensor.name for tensor in self.kept], kind_of[len(self.tensors) :])
        if self.constants:
            content["constants"] = self.constants
        return json.dumps(content, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Parse the output of :meth:`to_json`; :attr:`id` is the digest of that text."""
        content = json.loads(text)
        constants = set(content.get("constants", ()))
        kinds = [(tuple(shape), dtype) for shape, dtype in content["kinds"]]
        parts = [TensorSlice(tuple(offsets), tuple(sizes)) for offsets, sizes in content["slices"]]
        names = content["tensors"][0]

        def entries(names: list[str], kind_of: list[int]) -> tuple[TensorEntry, ...]:
            return tuple(TensorEntry(name, *kinds[kind]) for name, kind in zip(names, kind_of, strict=True))

        manifest = cls(
            tensors=entries(*content["tensors"]),
            kept=entries(*content.get("kept", ((), ()))),
            buckets=tuple(
                BucketEntry(
                    size,
                    tuple(
                        BucketSlice(names[tensor], offset, parts[part])
                        for tensor, offset, part in zip(*columns, strict=True)
                    ),
                    index in constants,
                )
                for index, (size, *columns) in enumerate(content["buckets"])
            ),
        )
        vars(manifest)["id"] = _digest(text)
        return manifest


def _numbered(items: Iterable[_Item]) -> tuple[list[_Item], list[int]]:
    """Return the distinct items in order of first occurrence, and each item's position among them.

    A push has tens of thousands of tensors, but only a few hundred distinct shapes and slices.
    """
    numbers: dict[_Item, int] = {}
    column = [numbers.setdefault(item, len(numbers)) for item in items]
    return list(numbers), column


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def pack_whole(tensors: Iterable[tuple[str, tuple[int, ...], torch.dtype]]) -> tuple[list[TensorEntry], BucketEntry]:
    """Lay whole tensors into one bucket, one after the other."""
    entries: list[TensorEntry] = []
    slices: list[BucketSlice] = []
    end = 0
    for name, shape, dtype in tensors:
        entry = TensorEntry(name, tuple(shape), dtype_name(dtype))
        start = align(end)
        entries.append(entry)
        slices.append(BucketSlice(name, start, TensorSlice.whole(shape)))
        end = start + entry.num_bytes
    return entries, BucketEntry(end, tuple(slices))
