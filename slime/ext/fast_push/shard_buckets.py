"""Buckets that every rank fills from its own parameters: nothing is gathered, and tensors are not handled one by one.

Made once: what each rank holds of which HF tensor (:class:`ShardSlices`), who sends what (``shard_plan``), and for
each bucket a table of all its slices.  A push is then one launch per bucket, which copies, casts or quantises straight
from the parameters into the rank's one buffer.  That buffer stays where it is, so that engines map it once.

Parameters that do not allow this (an fp8 block that two ranks share, quantization other than by blocks) are logged
once and sent gathered, in buckets after the others; so are parameters that no training step changes.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from slime.backends.megatron_utils import cpu_platform  # noqa: F401

# isort: split
from megatron.core import mpu
from megatron.core.utils import unwrap_model

from slime.backends.megatron_utils.parameters import Shard, iter_global_parameters, tensor_parallel_group
from slime.backends.megatron_utils.update_weight.gather import HostWeights, is_gate_up, sent_dtype
from slime.backends.megatron_utils.update_weight.transport import SentWeights
from slime.ext.fast_push.carrier import NO_BUCKET
from slime.ext.fast_push.gathered_buckets import GatheredBuckets
from slime.ext.fast_push.kernels.tables import CastItem, CastTable, Kind
from slime.ext.fast_push.manifest import ALIGNMENT, BucketEntry, BucketSlice, Manifest, align
from slime.ext.fast_push.shard_layout import (
    RowRuns,
    ShardLayout,
    ShardSlice,
    TensorSplit,
)
from slime.ext.fast_push.shard_plan import (
    PlannedBucket,
    PlannedSlice,
    ShardPlan,
    SliceHeader,
    plan_shards,
)
from slime.utils.distributed_utils import gather_objects
from slime.utils.errors import SlimeError, WeightSyncError
from slime.weights.quantize.block_fp8 import DEFAULT_BLOCK, num_blocks
from slime.weights.quantize.formats import BlockFp8

logger = logging.getLogger(__name__)

_LAYER_NUMBER = re.compile(r"\.\d+\.")
_RankSlices = tuple[int, list[tuple[str, SliceHeader]], dict[str, str], str | None]
"""A rank's stage, (parameter, slice) pairs, parameter that it cannot send -> reason, and its error or None."""


class ShardBuckets:
    """A ``carrier.BucketSource`` of shards.  Construction is collective over all ranks.

    Args:
        weights: what to send; its ``bucket_bytes`` limits each rank's buckets, or with ``by_stage`` the sum of the
            buckets of a turn.
        by_stage: True if pipeline stages send in turn, and one rank of each collects the buckets of all its ranks
            (:class:`CollectedBuckets`); otherwise all ranks send at the same time.

    Raises:
        WeightSyncError: a rank cannot plan its slices, or the ranks' slices do not make up every tensor exactly once.
    """

    def __init__(self, weights: SentWeights, *, by_stage: bool = False) -> None:
        self._weights = weights
        failure: SlimeError | None = None
        try:
            self._slices = ShardSlices(weights)
        except SlimeError as error:  # raised after the exchange: other ranks may succeed, and would wait
            failure = error
        stages, held, self.misfits = self._exchange(by_stage, failure)
        self._slices.exclude(self.misfits)
        self._slices.exclude(weights.constants)
        groups = [[rank for rank, stage in enumerate(stages) if stage == turn] for turn in sorted(set(stages))]
        self.plan: ShardPlan = plan_shards(
            held,
            bucket_bytes=share_of(weights.bucket_bytes, max(map(len, groups))) if by_stage else weights.bucket_bytes,
            quantizer=weights.quantizer,
            groups=groups,
        )
        self.group_ranks = next(ranks for ranks in self.plan.groups if dist.get_rank() in ranks)
        """Ranks that send in the same turn as this one."""
        self._own: tuple[PlannedBucket, ...] = self.plan.buckets[dist.get_rank()]
        self._manifest = self.plan.manifest
        self._gathered: GatheredBuckets | None = None
        if gathered := weights.constants.union(self.misfits):
            self._gathered = GatheredBuckets(weights, across_stages=not by_stage, only=gathered)
            rest = self._gathered.manifest
            self._manifest = Manifest(
                (*self.plan.manifest.tensors, *rest.tensors), (*self.plan.manifest.buckets, *rest.buckets)
            )
            if dist.get_rank() == 0:
                for sentence in describe_misfits(self.misfits):
                    logger.info("%s", sentence)
        self.record_digests: Callable[[int, Tensor], None] | None = None
        """If set, called with each bucket's index and slice digests, which are cheaper to compute while filling."""
        self._buffer: Tensor | None = None
        self._pointers: list[int] = []
        self._tables: list[CastTable] = []

    @property
    def manifest(self) -> Manifest:
        """All tensors and buckets; the gathered ones last."""
        return self._manifest

    def _exchange(
        self, by_stage: bool, failure: SlimeError | None
    ) -> tuple[list[int], list[list[SliceHeader]], Mapping[str, str]]:
        """Exchange the ranks' stages (0 unless ``by_stage``), slices, and misfits (parameter -> reason).

        A parameter that one rank cannot send by itself is gathered on all ranks.

        Raises:
            WeightSyncError: a rank failed.
        """
        stage = mpu.get_pipeline_model_parallel_rank() if by_stage else 0
        own: _RankSlices = (stage, [], {}, str(failure))
        if failure is None:
            own = (stage, self._slices.headers(), self._slices.misfits, None)
        ranks: list[_RankSlices] = gather_objects(own)
        for rank, (*_, reason) in enumerate(ranks):
            if reason is not None:
                raise WeightSyncError(f"trainer rank {rank} cannot plan its buckets: {reason}") from failure
        constants = self._weights.constants
        misfits = {n: reason for _, _, found, _ in ranks for n, reason in found.items() if n not in constants}
        gathered = constants.union(misfits)
        held = [[header for name, header in listed if name not in gathered] for _, listed, _, _ in ranks]
        return [stage for stage, *_ in ranks], held, misfits

    @torch.no_grad()
    def iter_buckets(self, *, with_constants: bool = True) -> Iterator[tuple[int, Tensor]]:
        """Yield (index, flat buffer) of this rank's own buckets, then of the gathered ones, which all ranks have."""
        for bucket, flat in self.iter_turns():
            yield (NO_BUCKET if bucket is None else bucket.index), flat
        num_own = len(self.plan.manifest.buckets)
        for index, flat in self.iter_gathered(with_constants=with_constants):
            yield num_own + index, flat

    @torch.no_grad()
    def iter_turns(self) -> Iterator[tuple[PlannedBucket | None, Tensor]]:
        """Yield one of this rank's own buckets per turn of its group (None if it has no more) and its flat buffer."""
        host_weights = self._weights.get_host_weights()
        self._refresh_tables(host_weights)
        buffer = self.buffer()
        for turn in range(self.plan.num_turns(self.group_ranks)):
            if turn >= len(self._own):
                yield None, buffer[:0]
                continue
            bucket = self._own[turn]
            flat = buffer[: bucket.num_bytes]
            if self.record_digests is None:
                self._tables[turn].run(flat)
            else:
                self.record_digests(bucket.index, self._tables[turn].run_with_digests(flat))
            if flat.is_cuda:
                torch.cuda.current_stream().synchronize()  # another process reads it next
            yield bucket, flat

    def iter_gathered(self, *, with_constants: bool = True) -> Iterator[tuple[int, Tensor]]:
        """Yield (index among the gathered buckets, flat buffer); all ranks of the group have these buckets."""
        if self._gathered is not None:
            yield from self._gathered.iter_buckets(self.buffer(), with_constants=with_constants)

    def buffer(self) -> Tensor:
        """Return the rank's only buffer, whose address never changes."""
        if self._buffer is None:
            size = max(self.plan.buffer_bytes, self._gathered.buffer_bytes if self._gathered else 0)
            self._buffer = torch.empty(size, dtype=torch.uint8, device=self._weights.device)
        return self._buffer

    def _refresh_tables(self, host_weights: HostWeights | None) -> None:
        """Make the tables, and remake them if a parameter's memory has moved since the last push."""
        pointers = [*map(Tensor.data_ptr, self._slices.tensors(host_weights))]
        if pointers == self._pointers:
            return
        quantizer = self._weights.quantizer
        self._tables = [
            CastTable(
                self._slices.items(bucket.slices, host_weights),
                self._weights.dtype,
                (quantizer and quantizer.block) or DEFAULT_BLOCK,
                device=self._weights.device,
                segments=self.plan.manifest.segments(bucket.index),
            )
            for bucket in self._own
        ]
        self._pointers = pointers


def share_of(num_bytes: int, num_ranks: int) -> int:
    """Return how many bytes each of ``num_ranks`` ranks may put into a bucket, a multiple of the alignment."""
    return max(num_bytes // num_ranks // ALIGNMENT * ALIGNMENT, min(num_bytes, ALIGNMENT))


def describe_misfits(misfits: Mapping[str, str]) -> list[str]:
    """Return one sentence per kind of gathered parameter, for all layers together."""
    kinds: dict[str, list[str]] = {}
    for name in sorted(misfits):
        kinds.setdefault(_LAYER_NUMBER.sub(".", name), []).append(name)
    return [
        f"{names[0]}{f' and {len(names) - 1} like it' if len(names) > 1 else ''}: gathered for every push, because "
        f"{misfits[names[0]]}"
        for names in kinds.values()
    ]


class CollectedBuckets:
    """A bucket source in which the first rank of each group collects and sends the buckets of the whole group.

    The bucket of a turn holds the buckets of all ranks of the group in that turn, in slots of equal size.

    Args:
        shards: the buckets that every rank fills, made with ``by_stage=True``.
        group: process group of the ranks that send in one turn of ``shards``, for the parameters' device.

    Raises:
        ValueError: ``group`` does not have the ranks of ``shards.group_ranks``.
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
        """(index, slot size in bytes) of the buckets of this rank's group."""
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
    def iter_buckets(self, *, with_constants: bool = True) -> Iterator[tuple[int, Tensor]]:
        """See ``BucketSource.iter_buckets``; only the first rank of the group has buckets."""
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
        for index, flat in self.shards.iter_gathered(with_constants=with_constants):
            if is_source:
                yield self._num_joined + index, flat
            else:
                yield NO_BUCKET, nothing

    def _buffer(self) -> Tensor:
        if self._joined is None:
            size = max((slot for _, slot in self._own), default=0) * len(self.shards.group_ranks)
            self._joined = self.shards.buffer().new_empty(size)
        return self._joined


def _joined(plan: ShardPlan, ranks: Sequence[int], turn: int) -> tuple[int, BucketEntry]:
    """Return slot size and joined bucket of a turn; a rank with no more buckets has an empty slot."""
    present = [
        (position, plan.manifest.buckets[plan.buckets[rank][turn].index])
        for position, rank in enumerate(ranks)
        if turn < len(plan.buckets[rank])
    ]
    slot = align(max(entry.num_bytes for _, entry in present))
    slices: list[BucketSlice] = [
        replace(part, offset=part.offset + slot * position) for position, entry in present for part in entry.slices
    ]
    return slot, BucketEntry(slot * len(ranks), tuple(slices))


# --- what a rank can send without asking another -------------------------------------------------------------------

SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class _Held:
    """A slice and the parameter that it is read from."""

    shard: Shard
    slice: ShardSlice
    dtype: torch.dtype
    """The dtype in which it is sent, unless it is quantized."""
    is_quantized: bool


class ShardSlices:
    """This rank's slices, in parameter order."""

    def __init__(self, weights: SentWeights) -> None:
        self._dtype, self._quantizer = weights.dtype, weights.quantizer
        self.misfits: dict[str, str] = {}
        """:attr:`Shard.name` of a parameter that this rank cannot send by itself -> reason."""
        self._held: list[_Held] = []
        self._live: dict[str, Tensor] = {}
        layout = ShardLayout(weights.form)
        config = unwrap_model(weights.model[0]).config
        seen: set[str] = set()
        for name, shard in iter_global_parameters(weights.model):
            if name in seen:  # chunks may share a parameter; the first counts
                continue
            seen.add(name)
            split = _split_of(shard, is_gated=config.gated_linear_unit)
            self._live[shard.key] = shard.parameter
            found = layout.slices(name, tuple(shard.tensor.shape), split)
            if found is None:
                self.misfits[shard.name] = "its export does more than move rows and columns"
                continue
            for one in found:
                self._take(shard, one)
        self.exclude(self.misfits)

    def _take(self, shard: Shard, part: ShardSlice) -> None:
        held = shard.tensor.dtype
        is_quantized = self._quantizer is not None and self._quantizer.is_quantized(part.name)
        if is_quantized and (reason := self._misfit(held, part)):
            self.misfits[shard.name] = reason
            return
        self._held.append(_Held(shard, part, sent_dtype(shard, self._dtype), is_quantized))

    def _misfit(self, held: torch.dtype, part: ShardSlice) -> str | None:
        """Return why this rank cannot quantize a slice by itself; None if it can."""
        assert self._quantizer is not None
        block = self._quantizer.block
        if block is None:
            return f"{part.name} is not quantized by blocks"
        if held != self._dtype:
            return f"{part.name} is rounded from {held} to {self._dtype} before it is quantized"
        if not part.is_on_blocks(block):
            return (
                f"a rank holds {list(part.slice.sizes)} of {part.name} from {list(part.slice.offsets)}, which does "
                f"not begin and end on blocks of {block[0]} x {block[1]}"
            )
        return None

    def exclude(self, misfits: Container[str]) -> None:
        """Drop the slices of the parameters with these names, which are sent another way."""
        self._held = [held for held in self._held if held.shard.name not in misfits]

    def headers(self) -> list[tuple[str, SliceHeader]]:
        """Return (parameter name, header) of each slice; :class:`PlannedSlice` refers to these positions."""
        return [
            (
                held.shard.name,
                SliceHeader(
                    held.slice.name, held.slice.whole_shape, held.dtype, held.slice.slice, held.slice.row_unit
                ),
            )
            for held in self._held
        ]

    def tensors(self, host_weights: HostWeights | None) -> list[Tensor]:
        """Return all tensors that are read, live or host copies; changed addresses mean that tables are stale."""
        if host_weights is None:
            return list(self._live.values())
        return [host_weights[key] for key in self._live]

    def items(self, planned: Sequence[PlannedSlice], host_weights: HostWeights | None) -> list[CastItem]:
        """Return the copies that write these slices into their bucket."""
        values: Mapping[str, Tensor] = self._live if host_weights is None else host_weights
        return [item for one in planned for item in self._items_of(one, values)]

    def _items_of(self, planned: PlannedSlice, values: Mapping[str, Tensor]) -> Iterator[CastItem]:
        held = self._held[planned.position]
        value = held.shard.part_of(values[held.shard.key]).detach()
        part = held.slice.between(planned.begin, planned.end)
        kind: Kind = "copy" if value.dtype == held.dtype else "cast"
        row_bytes = part.num_columns * held.dtype.itemsize
        scale_row_bytes, block_rows = 0, 1
        if held.is_quantized:
            assert self._quantizer is not None
            form = self._quantizer.format
            assert isinstance(form, BlockFp8)
            kind, row_bytes = "fp8_block_ue8m0" if form.ue8m0 else "fp8_block", part.num_columns
            block_rows = form.block[0]
            scale_row_bytes = num_blocks(1, part.num_columns, form.block)[1] * SCALE_BYTES
        done = 0
        for rows in part.rows:
            scale_offset = None
            if planned.scale_offset is not None:
                scale_offset = planned.scale_offset + done // block_rows * scale_row_bytes
            offset = planned.offset + done * row_bytes
            if value.dim() == 1:
                yield from _vector_items(value, rows, offset, kind, held.dtype)
            else:
                first = part.first_column
                source = value[rows.first :, first : first + part.num_columns]
                yield CastItem(source, rows.run, rows.stride, rows.count, offset, kind, scale_offset)
            done += rows.count


def _vector_items(value: Tensor, rows: RowRuns, offset: int, kind: Kind, dtype: torch.dtype) -> Iterator[CastItem]:
    """Treat the runs of a vector as the rows of a matrix; the last run may be shorter."""
    num_whole, rest = divmod(rows.count, rows.run)
    matrix = value.as_strided((num_whole, rows.run), (rows.stride or rows.run, 1), value.storage_offset() + rows.first)
    yield CastItem(matrix, num_whole, num_whole, num_whole, offset, kind)
    if rest:
        begin = rows.first + num_whole * rows.stride
        offset += num_whole * rows.run * dtype.itemsize
        yield CastItem(value[None, begin : begin + rest], 1, 1, 1, offset, kind)


def _split_of(shard: Shard, *, is_gated: bool) -> TensorSplit:
    group = tensor_parallel_group(shard)
    if shard.split_dim is None or group.size() == 1:
        return TensorSplit()
    return TensorSplit(shard.split_dim, group.rank(), group.size(), is_gate_up(shard, is_gated=is_gated))
