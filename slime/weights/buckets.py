"""Buckets: tensors grouped up to a byte limit, so that a push needs a bounded amount of extra memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from slime.utils.errors import ConfigError, WeightSyncError
from slime.weights.manifest import BucketEntry, Manifest, TensorEntry, align, pack_whole

Item = TypeVar("Item")

TogetherWith = Callable[[str], tuple[str, ...]]
"""The names, the given one included, that an engine must receive in one call; empty for an independent name."""


NO_BUCKET = -1
"""Index of a step in which a rank has nothing to send, and only takes part in the others' collectives."""


class BucketSource(Protocol):
    """The buckets of one model and layout.  Made on all ranks at once, and used in step."""

    @property
    def manifest(self) -> Manifest:
        """All tensors and buckets of the push, the same on all ranks; buckets are numbered over all senders."""

    def iter_buckets(self, *, with_constants: bool = True) -> Iterator[tuple[int, Tensor]]:
        """Yield this rank's buckets with the weights of now: ``(index in the manifest, flat uint8 buffer)``.

        Without the constant ones where these are not wanted.

        Collective over the ranks that send in one turn: all of them walk the iterator to its end, and it gives each of
        them equally many steps.  A step in which a rank has nothing to send is ``(NO_BUCKET, empty buffer)``.  One
        buffer is valid at a time: until the next step.  It starts at the first byte of its memory, and the same memory
        again is mapped by engines only once.  The same bucket may come from several ranks (each engine GPU
        then takes the one of the trainer rank beside it); its bytes are then the same on all of them.
        """


def iter_units(
    named: Iterable[tuple[str, Item]], together_with: TogetherWith | None
) -> Iterator[list[tuple[str, Item]]]:
    """Yield single tensors, and complete groups of those that must travel together, in the order of the last member.

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
            f"{members[0][0]} must reach the engine together with {', '.join(missing)}, which the model does not "
            "have; the table in slime_plugins.models is wrong"
        )


def plan_buckets(
    units: Iterable[list[tuple[str, tuple[int, ...], torch.dtype]]], bucket_bytes: int
) -> tuple[list[TensorEntry], list[BucketEntry]]:
    """Lay whole tensors into flat buckets of at most ``bucket_bytes``; a larger unit gets its own bucket.

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
