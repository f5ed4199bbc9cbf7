"""Whole tensors out of the slices that buckets bring, for loaders that want whole ones, and some of them together."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from slime.weights.manifest import BucketEntry, BucketSlice, Manifest

LIMIT_BYTES = 2 << 30
"""Memory that waiting tensors may take on each GPU."""

NamedTensors = list[tuple[str, Tensor]]


@dataclass
class Complete:
    """The tensors that can be loaded after a bucket has arrived."""

    direct: NamedTensors = field(default_factory=list)
    """Views of the bucket."""
    assembled: NamedTensors = field(default_factory=list)
    """Tensors that came in several buckets, or waited for a partner."""
    refused: set[str] = field(default_factory=set)
    """Tensors of which this bucket brought a slice that is not kept, for want of memory."""

    @property
    def tensors(self) -> NamedTensors:
        return [*self.direct, *self.assembled]


class HeldTensors:
    """Collects slices until a tensor, and all that must be loaded with it, is complete.

    Invariant: what waits is a copy, because the bucket that brought it will be overwritten.  A group of tensors is
    kept as a whole or refused as a whole, when the first slice of it comes.

    Args:
        manifest: the tensors of the push.
        groups: tensor to all the tensors that must be loaded together with it; one alone when it is missing.
        limit_bytes: of the copies.
    """

    def __init__(
        self, manifest: Manifest, groups: Mapping[str, frozenset[str]], *, limit_bytes: int = LIMIT_BYTES
    ) -> None:
        self._entries, self._groups, self._limit_bytes = manifest.by_name, groups, limit_bytes
        self._held: dict[str, Tensor] = {}
        self._missing: dict[str, int] = {}
        """Elements that have not come yet, of every tensor of a kept group."""
        self._refused: set[str] = set()
        self._num_bytes = 0

    def add(self, bucket: BucketEntry, flat: Tensor, names: Collection[str]) -> Complete:
        """Take those slices of a bucket that belong to ``names``."""
        result = Complete()
        parts = [part for part in bucket.slices if part.name in names]
        whole = {part.name for part in parts if part.slice.sizes == self._entries[part.name].shape}
        touched: dict[str, None] = {}
        for part in parts:
            group = self._group(part.name)
            view = part.view(flat, self._entries[part.name].torch_dtype)
            if group <= whole:
                result.direct.append((part.name, view))
            elif self._keeps(group):
                self._insert(part, view)
                touched[part.name] = None
            else:
                result.refused.add(part.name)
        for name in touched:
            group = self._group(name)
            if name in self._held and not any(self._missing[member] for member in group):
                result.assembled += [(member, self._held[member]) for member in sorted(group)]
                self._drop(group)
        return result

    @property
    def incomplete(self) -> list[str]:
        """Tensors that wait for the rest of themselves or of their group."""
        return sorted(self._held)

    def _group(self, name: str) -> frozenset[str]:
        return self._groups.get(name, frozenset((name,)))

    def _keeps(self, group: frozenset[str]) -> bool:
        """True when there is, or can be, memory for the group."""
        if any(name in self._refused for name in group):
            return False
        if any(name in self._missing for name in group):
            return True
        size = self._bytes_of(group)
        if self._num_bytes + size > self._limit_bytes:
            self._refused |= group
            return False
        self._num_bytes += size
        self._missing.update({name: math.prod(self._entries[name].shape) for name in group})
        return True

    def _insert(self, part: BucketSlice, view: Tensor) -> None:
        if part.name not in self._held:
            entry = self._entries[part.name]
            self._held[part.name] = torch.empty(entry.shape, dtype=entry.torch_dtype, device=view.device)
        part.slice.of(self._held[part.name]).copy_(view)
        self._missing[part.name] -= view.numel()

    def _drop(self, group: frozenset[str]) -> None:
        self._num_bytes -= self._bytes_of(group)
        for name in group:
            del self._held[name], self._missing[name]

    def _bytes_of(self, group: frozenset[str]) -> int:
        return sum(self._entries[name].num_bytes for name in group)
