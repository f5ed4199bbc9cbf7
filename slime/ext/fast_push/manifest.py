"""The contents of a push of weights: tensors, buckets, and the place of each slice.

The manifest is made once for a layout and sent ahead of the bytes; the buckets themselves are flat.  A tensor may come
in several slices (a trainer rank sends those that it holds), each stored row-major at its offset in the bucket.
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
"""Slices start at multiples of this many bytes, so that every kernel may read them in its widest words."""


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
        """Return the slice in the bucket ``flat`` (uint8) as a tensor of the slice's sizes."""
        size = self.slice.num_elements * dtype.itemsize
        return flat[self.offset : self.offset + size].view(dtype).view(self.slice.sizes)


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One HF tensor of the push."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """As SGLang spells it: ``bfloat16``, ``float8_e4m3fn``."""

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch has it."""
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
    """No step changes its tensors: a push leaves it out where every engine holds it from an earlier one."""


@dataclass(frozen=True)
class Manifest:
    """All tensors and buckets of a push.

    A tensor with a slice in a constant bucket has all of them in such.

    Raises:
        WeightSyncError: a slice is outside its tensor or its bucket, or names a tensor that is not listed; the
            slices of a tensor do not add up to it.
    """

    tensors: tuple[TensorEntry, ...]
    buckets: tuple[BucketEntry, ...]
    kept: tuple[TensorEntry, ...] = ()
    """Tensors that do not come: parts that are not trained, which engines keep as they read them from the model."""

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
        """Name of this layout: equal for equal content."""
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
        """Return first byte and number of bytes of each slice of a bucket, in the order in which they are digested."""
        return [
            (item.offset, item.slice.num_elements * self.by_name[item.name].torch_dtype.itemsize)
            for item in self.buckets[bucket_index].slices
        ]

    def to_json(self) -> str:
        """Return the compact text that :meth:`from_json` reads: columns, because layers and experts are alike."""
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
        """Return the manifest that :meth:`to_json` wrote; its :attr:`id` names the text."""
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
    """Return the distinct items in the order in which they first come, and the position of each item among them.

    A push names tens of thousands of tensors and has a few hundred kinds of shapes and slices.
    """
    numbers: dict[_Item, int] = {}
    column = [numbers.setdefault(item, len(numbers)) for item in items]
    return list(numbers), column


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def pack_whole(tensors: Iterable[tuple[str, tuple[int, ...], torch.dtype]]) -> tuple[list[TensorEntry], BucketEntry]:
    """Pack whole tensors into a bucket, one after the other."""
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
