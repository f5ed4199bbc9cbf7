"""The buckets of all ranks of a stage, joined on the rank that broadcasts them: one collective for each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from slime.backends.megatron_utils.update_weight.sources.bucket_source import NO_BUCKET
from slime.backends.megatron_utils.update_weight.sources.shard_buckets import ShardBuckets
from slime.backends.megatron_utils.update_weight.sources.shard_plan import ShardPlan
from slime.weights.manifest import BucketEntry, Manifest, Piece, align


class CollectedBuckets:
    """A source of buckets whose only sender is the first rank of each group; the others give it theirs.

    The bucket of a turn is what the ranks of the group have in that turn, one behind the other in slots of equal size.

    Args:
        shards: what every rank fills, made ``by_stage``.
        group: the ranks that send in one turn of ``shards``, on the device of the parameters.

    Raises:
        ValueError: ``group`` has other ranks than ``shards`` sends with.
    """

    def __init__(self, shards: ShardBuckets, group: dist.ProcessGroup) -> None:
        if sorted(dist.get_process_group_ranks(group)) != sorted(shards.group_ranks):
            raise ValueError(
                f"ranks {list(shards.group_ranks)} send in one turn; the group to collect their buckets has "
                f"{dist.get_process_group_ranks(group)}"
            )
        self.shards = shards
        self._group = group
        self._source_rank = shards.group_ranks[0]
        self._own: list[tuple[int, int]] = []
        """Index and slot size of the buckets of this rank's group."""
        entries: list[BucketEntry] = []
        for ranks in shards.plan.groups:
            for turn in range(shards.plan.num_turns(ranks)):
                slot, entry = _joined(shards.plan, ranks, turn)
                if ranks == shards.group_ranks:
                    self._own.append((len(entries), slot))
                entries.append(entry)
        self._num_joined = len(entries)
        gathered = shards.manifest.buckets[len(shards.plan.manifest.buckets) :]
        self._manifest = Manifest(shards.manifest.tensors, (*entries, *gathered))
        self._joined: Tensor | None = None

    @property
    def manifest(self) -> Manifest:
        """All tensors and buckets, the same on all ranks."""
        return self._manifest

    @torch.no_grad()
    def iter_buckets(self) -> Iterator[tuple[int, Tensor]]:
        """As ``BucketSource`` says; only the first rank of the group has buckets."""
        is_source = dist.get_rank() == self._source_rank
        nothing = self.shards.buffer()[:0]
        for (index, slot), _ in zip(self._own, self.shards.iter_turns(), strict=True):
            part = self.shards.buffer()[:slot]
            if not is_source:
                dist.gather(part, dst=self._source_rank, group=self._group)
                yield NO_BUCKET, nothing
                continue
            joined = self._buffer()[: slot * len(self.shards.group_ranks)]
            dist.gather(part, list(joined.split(slot)), dst=self._source_rank, group=self._group)
            yield index, joined
        num_own = len(self.shards.plan.manifest.buckets)
        for index, flat in self.shards.iter_gathered():
            if is_source:
                yield index - num_own + self._num_joined, flat
            else:
                yield NO_BUCKET, nothing

    def _buffer(self) -> Tensor:
        if self._joined is None:
            size = max((slot for _, slot in self._own), default=0) * len(self.shards.group_ranks)
            self._joined = self.shards.buffer().new_empty(size)
        return self._joined

    def release(self) -> None:
        """Give the buffers back; the next push makes them again."""
        self._joined = None
        self.shards.release()


def _joined(plan: ShardPlan, ranks: Sequence[int], turn: int) -> tuple[int, BucketEntry]:
    """Slot size and bucket of what ranks have in a turn; one whose buckets are all sent has an empty slot."""
    present = [
        (position, plan.manifest.buckets[plan.buckets[rank][turn].index])
        for position, rank in enumerate(ranks)
        if turn < len(plan.buckets[rank])
    ]
    slot = align(max(entry.num_bytes for _, entry in present))
    pieces: list[Piece] = [
        replace(piece, offset=piece.offset + slot * position) for position, entry in present for piece in entry.pieces
    ]
    return slot, BucketEntry(slot * len(ranks), tuple(pieces))
