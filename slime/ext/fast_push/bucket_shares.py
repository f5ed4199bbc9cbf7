"""The slices of each bucket that each rank of an engine reads: what it places, and its part of what no rank places.

So every byte of a push is digested by some rank, and every byte that a rank serves by that rank itself.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slime.ext.fast_push.kernels.tables import DigestTable
from slime.ext.fast_push.manifest import BucketEntry, Manifest
from slime.ext.fast_push.model_load import ModelLoad
from slime.utils.errors import WeightSyncError
from slime.weights.digest import combine_wrapped

Positions = NDArray[np.intp]
JOIN_BYTES = 1 << 20
"""Gap that costs less to copy from another GPU than another copy costs to start."""


def deal(taken: Sequence[Sequence[bytes]]) -> list[list[Positions]]:
    """Return the positions of the slices that each rank reads, by rank and bucket.

    Args:
        taken: by rank and bucket, a byte for each slice: 1 where the rank places something of it.
    """
    num_ranks = len(taken)
    shares: list[list[Positions]] = [[] for _ in taken]
    for masks in zip(*taken, strict=True):
        wanted = np.stack([np.frombuffer(mask, np.uint8) for mask in masks]).astype(bool)
        unwanted = np.flatnonzero(~wanted.any(axis=0))
        wanted[unwanted % num_ranks, unwanted] = True
        for share, row in zip(shares, wanted, strict=True):
            share.append(np.flatnonzero(row))
    return shares


class BucketShare:
    """The share of one rank in one bucket.

    Args:
        segments: first byte and number of bytes of every slice of the bucket.
        device: where the bytes are digested.
    """

    def __init__(self, positions: Positions, segments: Sequence[tuple[int, int]], device: torch.device) -> None:
        own = [segments[position] for position in positions]
        self._digests = DigestTable([begin for begin, _ in own], [size for _, size in own], device)
        self.ranges: list[tuple[int, int]] = []
        """First byte, and the one after the last, of what must be copied to read it."""
        for begin, size in sorted(own):
            if self.ranges and begin - self.ranges[-1][1] < JOIN_BYTES:
                self.ranges[-1] = (self.ranges[-1][0], max(begin + size, self.ranges[-1][1]))
            else:
                self.ranges.append((begin, begin + size))

    def digest(self, flat: Tensor) -> Tensor:
        """Return the digests of the slices in the bucket ``flat``, int64; on a GPU before the work is done."""
        return self._digests.run(flat)


class EngineShares:
    """The shares of all ranks of an engine in the buckets of one manifest, which all of them know alike."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self._is_beginning = False
        self._taken: list[list[bytes]] = []
        """Of each rank, what its models take of each bucket, as told last."""
        self._positions: list[list[Positions]] = []
        self._own: dict[int, BucketShare] = {}
        self.digests: dict[int, Tensor] = {}
        """Of this rank's share of each bucket that arrived in the push under way, on its device."""
        self._constants: dict[int, str] = {}
        """Digests of the constant buckets that the engine told last."""

    def begin(self) -> None:
        """Start a push: have the slices dealt at the next report, before the buckets come."""
        self._is_beginning, self.digests = True, {}

    def bucket(self, index: int) -> BucketEntry:
        buckets = self.manifest.buckets
        if not 0 <= index < len(buckets):
            raise WeightSyncError(f"there is no bucket {index}; the push has {len(buckets)}")
        return buckets[index]

    def newly_taken(self, loads: Iterable[ModelLoad], rank: int) -> list[bytes] | None:
        """Return what models take of each bucket, for :meth:`deal`; None where it is known, or a push under way."""
        if not self._is_beginning:
            return None
        ready = [load.taken() for load in loads if load.plan is not None and load.plan.manifest.id == self.manifest.id]
        own = []
        for index, bucket in enumerate(self.manifest.buckets):
            masks = [taken[index] for taken in ready] or [bytes(len(bucket.slices))]
            own.append(masks[0] if len(masks) == 1 else bytes(map(max, *masks)))
        return None if self._taken and self._taken[rank] == own else own

    def deal(self, told: Sequence[list[bytes] | None]) -> None:
        """Deal the slices to the ranks, where one of them takes others than before; all ranks do the same."""
        self._is_beginning = False
        taken = [new if new is not None else old for new, old in zip(told, self._taken or told, strict=True)]
        known = [masks for masks in taken if masks is not None]
        if len(known) == len(taken) and known != self._taken:
            self._taken, self._positions, self._own = known, deal(known), {}
            gc.freeze()  # the objects of manifest and plan last; a collection would walk over them in every push

    def positions(self, rank: int, index: int) -> Positions:
        """Return the positions of the slices of bucket ``index`` that a rank reads."""
        if not self._positions:
            raise WeightSyncError("the ranks of this engine have not dealt the buckets of the push; begin it again")
        return self._positions[rank][index]

    def share(self, rank: int, index: int, device: torch.device) -> BucketShare:
        if index not in self._own:
            positions = self.positions(rank, index)
            self._own[index] = BucketShare(positions, self.manifest.segments(index), device)
        return self._own[index]

    def digest(self, rank: int, index: int, flat: Tensor) -> None:
        """Note the digests of this rank's share of the bucket ``flat``."""
        digests = self.share(rank, index, flat.device).digest(flat)
        known = self.digests.setdefault(index, digests)
        if known is not digests and not torch.equal(known, digests):
            raise WeightSyncError(f"bucket {index} differs from its first read")

    def merge(self, digests: Sequence[Mapping[int, bytes]]) -> tuple[list[str], list[str]]:
        """Return the digest of each bucket, as 16 hexadecimal digits, and what ranks disagree on, one sentence each.

        Args:
            digests: by rank and bucket, those of the slices of the rank's share, int64.  A bucket that did not reach
                every rank that reads of it has the digest "".
        """
        texts, problems = [], []
        for index, bucket in enumerate(self.manifest.buckets):
            merged, is_known = np.zeros(len(bucket.slices), np.int64), np.zeros(len(bucket.slices), bool)
            has_come = bool(self._positions)
            for rank, (positions, told) in enumerate(zip((p[index] for p in self._positions), digests, strict=False)):
                if index not in told or not len(positions):
                    has_come &= not len(positions)
                    continue
                own = np.frombuffer(told[index], np.int64)
                differing = positions[is_known[positions] & (merged[positions] != own)]
                if len(differing):
                    name = bucket.slices[differing[0]].name
                    problems.append(f"rank {rank} has received other bytes of {name} than the ranks before it")
                merged[positions], is_known[positions] = own, True
            texts.append(f"{combine_wrapped(torch.from_numpy(merged)):016x}" if has_come else "")
        return texts, problems

    def with_constants(self, texts: list[str], *, are_held: bool, are_right: bool) -> list[str]:
        """Return digests with those of the constant buckets that are held from an earlier push.

        Args:
            are_right: the engine has no problem, and can be relied on to hold these constants in the next push.
        """
        constants = self.manifest.constants
        if are_held:
            texts = [self._constants.get(i, "") if i in constants else text for i, text in enumerate(texts)]
        self._constants = {index: texts[index] for index in constants} if are_right else {}
        return texts
