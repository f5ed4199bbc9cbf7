"""Slices of HF tensors that this rank can send without asking another, and where their numbers are read."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slime.backends.megatron_utils import cpu_platform  # noqa: F401

# isort: split
from megatron.core.utils import unwrap_model

from slime.backends.megatron_utils.parameters import Shard, iter_global_parameters, tensor_parallel_group
from slime.backends.megatron_utils.update_weight.bucket_source import SentWeights
from slime.backends.megatron_utils.update_weight.gather import HostWeights, is_gate_up, sent_dtype
from slime.ext.fast_push.kernels.tables import CastItem, Kind
from slime.ext.fast_push.shard_layout import (
    RowRuns,
    ShardLayout,
    ShardSlice,
    TensorSplit,
)
from slime.ext.fast_push.shard_plan import PlannedSlice, SliceHeader
from slime.weights.quantize.block_fp8 import num_blocks
from slime.weights.quantize.formats import BlockFp8

SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class _Held:
    """A slice, and the parameter that it is read from."""

    shard: Shard
    slice: ShardSlice
    dtype: torch.dtype
    """As it travels, unless it is quantised."""
    is_quantized: bool


class ShardSlices:
    """This rank's slices, in the order of its parameters.

    Args:
        weights: what the push sends.
    """

    def __init__(self, weights: SentWeights) -> None:
        self._dtype, self._quantizer = weights.dtype, weights.quantizer
        self.misfits: dict[str, str] = {}
        """:attr:`Shard.name` of the parameters that this rank cannot send by itself, and why."""
        self._held: list[_Held] = []
        self._live: dict[str, Tensor] = {}
        layout = ShardLayout(weights.args, weights.model_name)
        config = unwrap_model(weights.model[0]).config
        seen: set[str] = set()
        for name, shard in iter_global_parameters(weights.model):
            if name in seen:  # chunks may share a parameter: the first one's counts
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
        """Return the reason why this rank cannot quantize a slice by itself; None when it can."""
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
        """Drop what belongs to the parameters with these names: they travel another way."""
        self._held = [held for held in self._held if held.shard.name not in misfits]

    def headers(self) -> list[tuple[str, SliceHeader]]:
        """Return parameter name and header of each slice, at the position that :class:`PlannedSlice` refers to."""
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
        """Return all tensors that are read, live or host copies; their addresses tell whether a table is stale."""
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
    """Return the runs of a vector as the rows of a matrix; the last run may be shorter."""
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
