"""Group tensors up to a byte limit, so that a push needs a bounded amount of extra memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch
from torch import Tensor

from slime.utils.errors import ConfigError, WeightSyncError
from slime.weights.manifest import BucketEntry, TensorEntry, align, pack_whole
from slime.weights.named_tensors import NamedTensors, total_bytes

Item = TypeVar("Item")

TogetherWith = Callable[[str], tuple[str, ...]]
"""The names, the given one included, that an engine must receive in one call; empty for a name that stands alone."""


def iter_buckets(
    named_tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int, together_with: TogetherWith | None = None
) -> Iterator[NamedTensors]:
    """Consecutive tensors in buckets of at most ``bucket_bytes``; a larger tensor travels alone.

    The order is kept but for tensors that wait for those that they must travel with; no tensor is split, no bucket is
    empty.  Only one bucket is held at a time.

    Args:
        named_tensors: consumed lazily.
        bucket_bytes: the limit; ``--update-weight-buffer-size``.
        together_with: tensors that are never parted, even when they are larger than the limit together.

    Raises:
        ConfigError: the limit is not positive.
        WeightSyncError: the tensors end, and some wait for a partner that did not come.
    """
    if bucket_bytes <= 0:
        raise ConfigError(f"--update-weight-buffer-size is {bucket_bytes}; it must be a positive number of bytes")
    bucket: NamedTensors = []
    size = 0
    for unit in iter_units(named_tensors, together_with):
        added = total_bytes(unit)
        if bucket and size + added > bucket_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.extend(unit)
        size += added
    if bucket:
        yield bucket


def iter_units(
    named: Iterable[tuple[str, Item]], together_with: TogetherWith | None
) -> Iterator[list[tuple[str, Item]]]:
    """Single tensors, and complete groups of those that must travel together, in the order of the last member.

    Raises:
        WeightSyncError: the tensors end, and some wait for a partner that did not come.
    """
    waiting: dict[tuple[str, ...], list[tuple[str, Item]]] = {}
    for name, item in named:
        group = together_with(name) if together_with is not None else ()
        if not group:
            yield [(name, item)]
            continue
        members = waiting.setdefault(group, [])
        members.append((name, item))
        if len(members) == len(group):
            yield waiting.pop(group)
    if waiting:
        group, members = next(iter(waiting.items()))
        missing = sorted(set(group) - {name for name, _ in members})
        raise WeightSyncError(
            f"{members[0][0]} must reach the engine together with {', '.join(missing)}, which the model has not; the "
            "table of slime.backends.megatron_utils.weight_maps is wrong"
        )


def plan_buckets(
    units: Iterable[list[tuple[str, tuple[int, ...], torch.dtype]]], bucket_bytes: int
) -> tuple[list[TensorEntry], list[BucketEntry]]:
    """Lay whole tensors into flat buckets of at most ``bucket_bytes``; a larger unit has a bucket of its own.

    Args:
        units: name, shape and dtype of tensors; a unit is never parted.
        bucket_bytes: the limit; ``--update-weight-buffer-size``.

    Raises:
        ConfigError: the limit is not positive.
    """
    if bucket_bytes <= 0:
        raise ConfigError(f"--update-weight-buffer-size is {bucket_bytes}; it must be a positive number of bytes")
    tensors: list[TensorEntry] = []
    buckets: list[BucketEntry] = []
    held: list[tuple[str, tuple[int, ...], torch.dtype]] = []
    size = 0

    def close() -> None:
        entries, bucket = pack_whole(held)
        tensors.extend(entries)
        buckets.append(bucket)

    for unit in units:
        added = sum(align(math.prod(shape) * dtype.itemsize) for _, shape, dtype in unit)
        if held and size + added > bucket_bytes:
            close()
            held, size = [], 0
        held += unit
        size += added
    if held:
        close()
    return tensors, buckets
