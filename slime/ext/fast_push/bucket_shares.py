"""Assigns each bucket's slices to the ranks of an engine: a rank reads what it loads, and a share of what none loads.

So every byte of a push is digested by some rank, and every byte that a rank serves is digested by that rank itself.
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
"""Gaps below this many bytes are copied along, because that costs less than launching another GPU-to-GPU copy."""


def deal(taken: Sequence[Sequence[bytes]]) -> list[list[Positions]]:
    """Return, by rank and bucket, the positions of the slices that the rank reads.

    Args:
        taken: by rank and bucket, one byte per slice: 1 if the rank loads any of it.
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
    """One rank's share of one bucket.

    Args:
        positions: the slices that the rank reads.
        segments: first byte and number of bytes of every slice in the bucket.
        device: the device that digests the bytes.
    """

    def __init__(self, positions: Positions, segments: Sequence[tuple[int, int]], device: torch.device) -> None:
        own = [segments[position] for position in positions]
        self._digests = DigestTable([begin for begin, _ in own], [size for _, size in own], device)
        self.ranges: list[tuple[int, int]] = []
        """Byte ranges ``[begin, end)`` that must be copied to read the share."""
        for begin, size in sorted(own):
            if self.ranges and begin - self.ranges[-1][1] < JOIN_BYTES:
                self.ranges[-1] = (self.ranges[-1][0], max(begin + size, self.ranges[-1][1]))
            else:
                self.ranges.append((begin, begin + size))

    def digest(self, flat: Tensor) -> Tensor:
        """Return the digests of the share's slices in bucket ``flat``, int64; asynchronous on a GPU."""
        return self._digests.run(flat)


class EngineShares:
    """The shares of all ranks of an engine in one manifest's buckets; every rank has the same copy."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self._is_beginning = False
        self._taken: list[list[bytes]] = []
        """By rank and bucket, the mask of slices that the rank's models load, as reported last."""
        self._positions: list[list[Positions]] = []
        self._own: dict[int, BucketShare] = {}
        self.digests: dict[int, Tensor] = {}
        """Bucket index -> digests of this rank's share, on its device, for buckets that arrived in this push."""
        self._constants: dict[int, str] = {}
        """Digests of the constant buckets as the engine reported them last."""

    def begin(self) -> None:
        """Start a push: slices are dealt at the next report, before buckets arrive."""
        self._is_beginning, self.digests = True, {}

    def bucket(self, index: int) -> BucketEntry:
        buckets = self.manifest.buckets
        if not 0 <= index < len(buckets):
            raise WeightSyncError(f"there is no bucket {index}; the push has {len(buckets)}")
        return buckets[index]

    def newly_taken(self, loads: Iterable[ModelLoad], rank: int) -> list[bytes] | None:
        """Return the mask of slices that models load, per bucket, for :meth:`deal`; None if unchanged or dealt."""
        if not self._is_beginning:
            return None
        ready = [load.taken() for load in loads if load.plan is not None and load.plan.manifest.id == self.manifest.id]
        own = []
        for index, bucket in enumerate(self.manifest.buckets):
            masks = [taken[index] for taken in ready] or [bytes(len(bucket.slices))]
            own.append(masks[0] if len(masks) == 1 else bytes(map(max, *masks)))
        return None if self._taken and self._taken[rank] == own else own

    def deal(self, told: Sequence[list[bytes] | None]) -> None:
        """Deal the slices to the ranks if any rank's slices changed; all ranks compute the same result."""
        self._is_beginning = False
        taken = [new if new is not None else old for new, old in zip(told, self._taken or told, strict=True)]
        known = [masks for masks in taken if masks is not None]
        if len(known) == len(taken) and known != self._taken:
            self._taken, self._positions, self._own = known, deal(known), {}
            gc.freeze()  # manifest and plan live on; without this every collection would traverse them

    def positions(self, rank: int, index: int) -> Positions:
        """Return the positions of the slices in bucket ``index`` that a rank reads."""
        if not self._positions:
            raise WeightSyncError("the ranks of this engine have not dealt the buckets of the push; begin it again")
        return self._positions[rank][index]

    def share(self, rank: int, index: int, device: torch.device) -> BucketShare:
        if index not in self._own:
            positions = self.positions(rank, index)
            self._own[index] = BucketShare(positions, self.manifest.segments(index), device)
        return self._own[index]

    def digest(self, rank: int, index: int, flat: Tensor) -> None:
        """Record the digests of this rank's share of bucket ``flat``."""
        digests = self.share(rank, index, flat.device).digest(flat)
        known = self.digests.setdefault(index, digests)
        if known is not digests and not torch.equal(known, digests):
            raise WeightSyncError(f"bucket {index} differs from its first read")

    def merge(self, digests: Sequence[Mapping[int, bytes]]) -> tuple[list[str], list[str]]:
        """Return each bucket's digest as 16 hexadecimal digits, and one sentence per disagreement between ranks.

        Args:
            digests: by rank and bucket, the int64 digests of the rank's slices as bytes.  A bucket that did not reach
                every rank that reads from it gets the digest "".
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
                    problems.append(f"rank {rank} received different bytes of {name} than earlier ranks")
                merged[positions], is_known[positions] = own, True
            texts.append(f"{combine_wrapped(torch.from_numpy(merged)):016x}" if has_come else "")
        return texts, problems

    def with_constants(self, texts: list[str], *, are_held: bool, are_right: bool) -> list[str]:
        """Return ``texts`` with the digests of constant buckets held from an earlier push filled in.

        Args:
            are_held: all ranks still hold the constant buckets.
            are_right: the engine has no problem, so these digests may be reused in the next push.
        """
        constants = self.manifest.constants
        if are_held:
            texts = [self._constants.get(i, "") if i in constants else text for i, text in enumerate(texts)]
        self._constants = {index: texts[index] for index in constants} if are_right else {}
        return texts
