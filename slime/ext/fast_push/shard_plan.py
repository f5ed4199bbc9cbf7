"""The plan of a push: sender, bucket and offset of every slice of every tensor, computed identically on every rank.

Ranks that hold the same slice (data- and context-parallel replicas, the tensor-parallel ranks of a parameter that is
not split, two pipeline stages with a tied embedding) share its bytes among them; no byte is sent twice.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from slime.ext.fast_push.manifest import BucketEntry, BucketSlice, Manifest, TensorEntry, align
from slime.utils.errors import ConfigError, WeightSyncError
from slime.weights.named_tensors import Header, dtype_name
from slime.weights.quantize import Quantizer
from slime.weights.tensor_slice import TensorSlice

MIN_SLICE_BYTES = 1 << 20
"""Replicas share slices larger than this by splitting them."""
SLICES_PER_RANK = 16
"""Slices with several holders are split into about 1 / this of a rank's fair share, so that shares come out even."""


@dataclass(frozen=True, slots=True)
class SliceHeader:
    """A slice of one HF tensor that a rank can send; equal on all ranks that hold a replica."""

    name: str
    whole_shape: tuple[int, ...]
    dtype: torch.dtype
    """The dtype in which it is sent, unless it is quantized."""
    slice: TensorSlice
    row_unit: int = 1
    """Splits are made at multiples of this many rows where possible."""

    def __reduce__(self) -> tuple[type[SliceHeader], tuple[Any, ...]]:
        """Pickle as a call: headers go to all ranks, and dataclasses' default takes three times as long."""
        return SliceHeader, (self.name, self.whole_shape, self.dtype, self.slice, self.row_unit)


@dataclass(frozen=True, slots=True)
class PlannedSlice:
    """Rows ``begin`` (inclusive) to ``end`` (exclusive) of a slice that a rank holds, in one of its buckets."""

    position: int
    """Position of the slice among the rank's slices."""
    begin: int
    end: int
    offset: int
    """First byte in the bucket."""
    scale_offset: int | None = None
    """First byte of the scales, if quantized."""


@dataclass(frozen=True, slots=True)
class PlannedBucket:
    """One bucket of one rank."""

    index: int
    """Index in the manifest."""
    num_bytes: int
    slices: tuple[PlannedSlice, ...]


@dataclass
class _Share:
    """The slices assigned to one rank so far."""

    num_bytes: int = 0
    parts: list[tuple[int, int, int]] = field(default_factory=list)
    """(position of the slice among the rank's slices, first row, last row + 1)."""


@dataclass(frozen=True)
class ShardPlan:
    """Tensors, buckets, and the buckets of each rank.

    ``buckets[rank][turn]`` is what the rank sends in a turn.  In the last turns of a group, some of its ranks may have
    no bucket.
    """

    manifest: Manifest
    buckets: tuple[tuple[PlannedBucket, ...], ...]
    groups: tuple[tuple[int, ...], ...]
    """Ranks that send at the same time, in the order in which the groups send."""

    @property
    def buffer_bytes(self) -> int:
        """Size of every rank's buffer: the largest bucket of any rank, rounded up."""
        return align(max((bucket.num_bytes for owned in self.buckets for bucket in owned), default=0))

    def num_turns(self, ranks: Iterable[int]) -> int:
        """Return how many turns these ranks need to send all their buckets."""
        return max((len(self.buckets[rank]) for rank in ranks), default=0)


def plan_shards(
    held: Sequence[Sequence[SliceHeader]],
    *,
    bucket_bytes: int,
    quantizer: Quantizer | None = None,
    groups: Sequence[Sequence[int]] | None = None,
) -> ShardPlan:
    """Share the slices among the ranks and pack each rank's share into buckets.

    Args:
        held: each rank's slices.
        bucket_bytes: the largest bucket; ``--update-weight-buffer-size``.
        quantizer: quantizes some tensors; None if none are quantized.
        groups: ranks that send at the same time, in the order in which the groups send; None for all at once.  Buckets
            are numbered by group, turn and rank.

    Raises:
        ConfigError: ``bucket_bytes`` is not positive.
        WeightSyncError: the slices of a tensor do not add up to the whole tensor, or replicas are split differently.
    """
    if bucket_bytes <= 0:
        raise ConfigError(f"--update-weight-buffer-size is {bucket_bytes}; it must be a positive number of bytes")
    sizes = _Sizes(quantizer)
    shares = _share(held, sizes, bucket_bytes)
    drafts = [list(_pack(own, share.parts, sizes, bucket_bytes)) for own, share in zip(held, shares, strict=True)]
    groups = (tuple(range(len(held))),) if groups is None else tuple(map(tuple, groups))
    entries: list[BucketEntry] = []
    owned: list[list[PlannedBucket]] = [[] for _ in held]
    for ranks in groups:
        for turn in range(max((len(drafts[rank]) for rank in ranks), default=0)):
            for rank in ranks:
                if turn < len(drafts[rank]):
                    num_bytes, planned, slices = drafts[rank][turn]
                    owned[rank].append(PlannedBucket(len(entries), num_bytes, tuple(planned)))
                    entries.append(BucketEntry(num_bytes, tuple(slices)))
    tensors: dict[str, TensorEntry] = {}
    for own in held:
        for header in own:
            if header.name not in tensors:
                for name, shape, dtype in sizes.outputs(header):
                    tensors[name] = TensorEntry(name, shape, dtype_name(dtype))
    manifest = Manifest(tuple(tensors.values()), tuple(entries))
    return ShardPlan(manifest, tuple(map(tuple, owned)), groups)


class _Sizes:
    """Computes sizes of rows of slices.  Cached, because experts and layers are alike."""

    def __init__(self, quantizer: Quantizer | None) -> None:
        self._quantizer = quantizer
        self._outputs: dict[str, list[Header]] = {}
        self._sent: dict[Any, list[tuple[TensorSlice, int]]] = {}
        self._ranges: dict[Any, list[tuple[int, int, int]]] = {}

    def is_quantized(self, header: SliceHeader) -> bool:
        """Return True if the slice is sent quantized."""
        return self._quantizer is not None and self._quantizer.is_quantized(header.name)

    def outputs(self, header: SliceHeader) -> list[Header]:
        """Return name, shape and dtype of the tensors as which the slice's HF tensor is sent."""
        known = self._outputs.get(header.name)
        if known is None:
            known = [(header.name, header.whole_shape, header.dtype)]
            if self._quantizer is not None and self.is_quantized(header):
                known = self._quantizer.outputs(header.name, header.whole_shape)
            self._outputs[header.name] = known
        return known

    def sent(self, header: SliceHeader, begin: int, end: int) -> list[tuple[TensorSlice, int]]:
        """Return, for each of :meth:`outputs`, the slice and bytes that rows ``begin`` to ``end`` become."""
        key = (header.slice, header.dtype, self.is_quantized(header), begin, end)
        known = self._sent.get(key)
        if known is None:
            rows = header.slice.rows(begin, end)
            (_, _, dtype), *scales = self.outputs(header)
            known = [(rows, rows.num_elements * dtype.itemsize)]
            for _, _, scale_dtype in scales:
                assert self._quantizer is not None and self._quantizer.block is not None
                blocks = rows.in_blocks(self._quantizer.block)
                known.append((blocks, blocks.num_elements * scale_dtype.itemsize))
            self._sent[key] = known
        return known

    def num_bytes(self, header: SliceHeader, begin: int, end: int) -> int:
        """Return the bytes that the rows take in a bucket, including padding before the next slice."""
        return sum(align(size) for _, size in self.sent(header, begin, end))

    def row_ranges(self, header: SliceHeader, max_bytes: int) -> list[tuple[int, int, int]]:
        """Split rows into ranges of at most ``max_bytes`` if possible: (first row, last row + 1, bytes) of each."""
        key = (header.slice, header.dtype, self.is_quantized(header), header.row_unit, max_bytes)
        if key not in self._ranges:
            num_rows, step = header.slice.sizes[0], self._rows_of_range(header, max_bytes)
            ranges = [(begin, min(begin + step, num_rows)) for begin in range(0, num_rows, step)]
            self._ranges[key] = [(begin, end, self.num_bytes(header, begin, end)) for begin, end in ranges]
        return self._ranges[key]

    def _rows_of_range(self, header: SliceHeader, max_bytes: int) -> int:
        num_rows = header.slice.sizes[0]
        least = 1
        if self._quantizer is not None and self._quantizer.block is not None and self.is_quantized(header):
            least = self._quantizer.block[0]
        unit = math.lcm(least, header.row_unit)
        if header.row_unit % least == 0 and self.num_bytes(header, 0, min(unit, num_rows)) > max_bytes:
            unit = least
        fitting = max(1, int(max_bytes / max(self.num_bytes(header, 0, num_rows), 1) * num_rows) // unit)
        while fitting > 1 and self.num_bytes(header, 0, min(fitting * unit, num_rows)) > max_bytes:
            fitting -= 1
        return fitting * unit


def _share(held: Sequence[Sequence[SliceHeader]], sizes: _Sizes, bucket_bytes: int) -> list[_Share]:
    """Assign each slice to one rank, or its rows to several: the largest part first, to the rank with the least."""
    holders: dict[tuple[str, tuple[int, ...]], list[tuple[int, int]]] = {}
    for rank, own in enumerate(held):
        for position, header in enumerate(own):
            holders.setdefault((header.name, header.slice.offsets), []).append((rank, position))
    total = 0
    for (name, _), replicas in holders.items():
        first = held[replicas[0][0]][replicas[0][1]]
        total += sizes.num_bytes(first, 0, first.slice.sizes[0])
        for rank, position in replicas[1:]:
            if held[rank][position] != first:
                raise WeightSyncError(
                    f"ranks {replicas[0][0]} and {rank} hold different slices of {name}: {first} and "
                    f"{held[rank][position]}; replicas of a parameter must be split alike"
                )
    fine = min(bucket_bytes, max(total // (SLICES_PER_RANK * len(held)), MIN_SLICE_BYTES))
    shares = [_Share() for _ in held]
    shared: list[tuple[int, int, int, list[tuple[int, int]]]] = []
    for replicas in holders.values():
        header = held[replicas[0][0]][replicas[0][1]]
        for begin, end, size in sizes.row_ranges(header, bucket_bytes if len(replicas) == 1 else fine):
            if len(replicas) > 1:
                shared.append((size, begin, end, replicas))
                continue
            ((rank, position),) = replicas
            shares[rank].num_bytes += size
            shares[rank].parts.append((position, begin, end))
    shared.sort(key=lambda part: -part[0])  # stable, so identical on every rank
    for size, begin, end, replicas in shared:
        rank, position = min(replicas, key=lambda holder: shares[holder[0]].num_bytes)
        shares[rank].num_bytes += size
        shares[rank].parts.append((position, begin, end))
    for share in shares:
        share.parts.sort()
    return shares


def _pack(
    own: Sequence[SliceHeader], parts: Sequence[tuple[int, int, int]], sizes: _Sizes, bucket_bytes: int
) -> Iterator[tuple[int, list[PlannedSlice], list[BucketSlice]]]:
    """Pack a rank's share, in order, into buckets; yield (bytes, planned slices, manifest slices) of each."""
    end_of_last = 0
    planned: list[PlannedSlice] = []
    slices: list[BucketSlice] = []
    for position, begin, end in parts:
        header = own[position]
        size = sizes.num_bytes(header, begin, end)
        if planned and align(end_of_last) + size > bucket_bytes:
            yield end_of_last, planned, slices
            end_of_last, planned, slices = 0, [], []
        offsets = []
        for (name, _, _), (part, num_bytes) in zip(sizes.outputs(header), sizes.sent(header, begin, end), strict=True):
            offset = align(end_of_last)
            offsets.append(offset)
            slices.append(BucketSlice(name, offset, part))
            end_of_last = offset + num_bytes
        planned.append(PlannedSlice(position, begin, end, offsets[0], offsets[1] if len(offsets) > 1 else None))
    if planned:
        yield end_of_last, planned, slices
