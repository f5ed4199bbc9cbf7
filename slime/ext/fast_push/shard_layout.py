"""Finds where the elements of HF tensors lie in the parameters that this rank holds.

Nothing here depends on a model family.  To learn what an export does to a parameter, index tensors are exported in its
place: ``convert_to_hf`` gets the index of every element along one dimension, and so does the join of tensor-parallel
parts.  The result tells, for each row and column of each HF tensor, which rank holds it and in which row and column of
its part.

An export that moves whole rows and whole columns is described by :class:`ShardSlice`; parameters with any other export
are sent gathered (``gathered_buckets``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slime.backends.megatron_utils.megatron_to_hf import HfForm, plain_tensors
from slime.backends.megatron_utils.models.rule import Rule
from slime.backends.megatron_utils.models.weight_layouts import VOCABULARY, tensor_parallel_join
from slime.weights.stacked_experts import row_of
from slime.weights.tensor_slice import TensorSlice


@dataclass(frozen=True, slots=True)
class RowRuns:
    """``count`` rows of a parameter in a regular order.

    Row ``r`` of them is row ``first + (r // run) * stride + r % run`` of the parameter: runs of adjacent rows at a
    constant distance, like the query rows of an interleaved qkv.
    """

    first: int
    count: int
    run: int
    stride: int

    def between(self, begin: int, end: int) -> Iterator[RowRuns]:
        """Yield rows ``begin`` (inclusive) to ``end`` (exclusive) of these; a cut through a run makes two runs."""
        while begin < end:
            number, offset = divmod(begin, self.run)
            first = self.first + number * self.stride + offset
            if offset or end - begin <= self.run:
                count = min(self.run - offset, end - begin)
                yield RowRuns(first, count, count, 0)
            else:
                is_last_partial = (end - begin) % self.run
                count = end - begin - is_last_partial
                yield RowRuns(first, count, self.run, self.stride)
            begin += count


@dataclass(frozen=True, slots=True)
class ShardSlice:
    """A slice of one HF tensor that this rank holds: row-major, ``rows`` in order, starting at ``first_column``.

    A vector counts as a matrix with one column.
    """

    name: str
    whole_shape: tuple[int, ...]
    slice: TensorSlice
    first_column: int
    rows: tuple[RowRuns, ...]

    @property
    def num_rows(self) -> int:
        return self.slice.sizes[0]

    @property
    def num_columns(self) -> int:
        """Elements per row."""
        return math.prod(self.slice.sizes[1:])

    @property
    def row_unit(self) -> int:
        """Splits at multiples of this many rows do not cut through a run."""
        return math.lcm(*(rows.run for rows in self.rows if rows.count > rows.run))

    def between(self, begin: int, end: int) -> ShardSlice:
        """Return rows ``begin`` (inclusive) to ``end`` (exclusive) of the slice."""
        if (begin, end) == (0, self.num_rows):
            return self
        runs: list[RowRuns] = []
        position = 0
        for rows in self.rows:
            low, high = max(begin, position), min(end, position + rows.count)
            if low < high:
                runs.extend(rows.between(low - position, high - position))
            position += rows.count
        return ShardSlice(self.name, self.whole_shape, self.slice.rows(begin, end), self.first_column, tuple(runs))

    def is_on_blocks(self, block: tuple[int, int]) -> bool:
        """Return True if its edges and the seams of its ``rows`` lie on block boundaries or the HF tensor's end.

        The same must hold for its parts, wherever it is cut between two blocks.
        """
        offsets, sizes = self.slice.offsets, self.slice.sizes
        if len(sizes) != 2:
            return False
        for start, extent, size, step in zip(offsets, sizes, self.whole_shape, block, strict=True):
            if start % step or ((start + extent) % step and start + extent != size):
                return False
        # A cut through a run leaves a seam at the end of that run.
        runs = (rows.run for rows in self.rows if rows.count > rows.run)
        return all(row % block[0] == 0 for row in (*self.seams(), *runs))

    def seams(self) -> Iterator[int]:
        """Yield the rows at which a new member of ``rows`` begins."""
        position = 0
        for rows in self.rows[:-1]:
            position += rows.count
            yield position


@dataclass(frozen=True, slots=True)
class TensorSplit:
    """A parameter's tensor-parallel split; ``dim`` is None if every rank holds the whole parameter."""

    dim: int | None = None
    rank: int = 0
    size: int = 1
    is_gate_up: bool = False
    """True if gate and up are split separately."""


class ShardLayout:
    """Finds the slices of parameters; results are cached for parameters that are alike."""

    def __init__(self, form: HfForm) -> None:
        self._form = form
        self._map, self._shape = form.weight_map, form.dims
        self._known: dict[tuple[Rule, tuple[int, ...], TensorSplit], tuple[tuple[ShardSlice, ...], ...] | None] = {}

    def hf_tensors(self, name: str, whole_shape: Sequence[int]) -> list[tuple[str, tuple[int, ...]]]:
        """Return names and shapes of the HF tensors that a whole parameter exports to.

        Args:
            name: global name, including the expert's number.
            whole_shape: shape of the whole parameter, including vocabulary padding.
        """
        converted = self._convert(name, torch.empty(tuple(whole_shape), device="meta"))
        return [(hf_name, tuple(tensor.shape)) for hf_name, tensor in converted]

    def slices(self, name: str, part_shape: Sequence[int], split: TensorSplit) -> list[ShardSlice] | None:
        """Return every slice of HF tensors in this rank's part of a parameter.

        Args:
            name: global name, including the expert's number.
            part_shape: shape of this rank's part.
            split: the parameter's tensor-parallel split.

        Returns:
            the slices, in the order of ``plain_tensors``; None if the export does more than move rows and columns.
        """
        whole_shape = list(part_shape)
        if split.dim is not None:
            whole_shape[split.dim] *= split.size
        rule, hf_names = self._map.find(name, self._shape)
        key = (rule, tuple(part_shape), split)
        if name in VOCABULARY or key not in self._known:  # only there do names depend on more than the rule
            hf_tensors = self.hf_tensors(name, whole_shape)
            hf_names = tuple(hf_name for hf_name, _ in hf_tensors)
            self._known[key] = self._work_out(name, tuple(whole_shape), hf_tensors, split)
        templates = self._known[key]
        if templates is None:
            return None
        return [
            ShardSlice(hf_name, found.whole_shape, found.slice, found.first_column, found.rows)
            for hf_name, slices in zip(hf_names, templates, strict=True)
            for found in slices
        ]

    def _convert(self, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
        return plain_tensors(self._form, name, tensor)

    def _work_out(
        self,
        name: str,
        whole_shape: tuple[int, ...],
        hf_tensors: Sequence[tuple[str, tuple[int, ...]]],
        split: TensorSplit,
    ) -> tuple[tuple[ShardSlice, ...], ...] | None:
        """Return the slices of each HF tensor, without names."""
        if not hf_tensors:
            return ()
        if len(whole_shape) not in (1, 2) or any(row_of(hf_name) for hf_name, _ in hf_tensors):
            return None  # a row name belongs to a tensor that holds all experts
        held = [_held_indices(size, dim, split) for dim, size in enumerate(whole_shape)]
        per_dim = [self._convert(name, _index_along(whole_shape, dim)) for dim in range(len(whole_shape))]
        result = []
        for outputs in zip(*per_dim, strict=True):
            axes = [_axis_of(tensor, dim) for dim, (_, tensor) in enumerate(outputs)]
            if any(
                axis is None or tensor.dim() != len(whole_shape)
                for axis, (_, tensor) in zip(axes, outputs, strict=True)
            ):
                return None
            ranges = [
                _contiguous(own[axis.long()], joins=dim == 0)
                for dim, (own, axis) in enumerate(zip(held, axes, strict=True))
                if axis is not None
            ]
            result.append(tuple(_slices_of(tuple(outputs[0][1].shape), ranges)))
        return tuple(result)


def _index_along(shape: tuple[int, ...], dim: int) -> Tensor:
    """Return a ``shape`` tensor of indices along ``dim``, in the memory of a vector."""
    view = [1] * len(shape)
    view[dim] = shape[dim]
    return torch.arange(shape[dim], dtype=torch.int32).view(view).expand(shape)


def _axis_of(exported: Tensor, dim: int) -> Tensor | None:
    """Return the indices along ``dim`` of an exported :func:`_index_along`; None if they vary in other dimensions."""
    axis = exported
    for other in reversed(range(exported.dim())):
        if other != dim:
            if exported.size(other) == 0:
                return None
            axis = axis.select(other, 0)
    if axis.dim() != 1:
        return None
    is_broadcast = all(exported.stride(d) == 0 or exported.size(d) == 1 for d in range(exported.dim()) if d != dim)
    if not is_broadcast:  # a broadcast view needs no comparison; a copy does
        view = [1] * exported.dim()
        view[dim] = axis.numel()
        if not torch.equal(exported, axis.view(view).expand_as(exported)):
            return None
    return axis


def _held_indices(size: int, dim: int, split: TensorSplit) -> Tensor:
    """Map each index of the whole parameter's dimension to an index in this rank's part, or -1 if not in it."""
    if dim != split.dim:
        return torch.arange(size)
    length = size // split.size
    parts = [torch.arange(length) + rank * length for rank in range(split.size)]
    joined = tensor_parallel_join(parts, dim=0, is_gate_up=split.is_gate_up)
    return torch.where(joined // length == split.rank, joined % length, -1)


def _contiguous(own: Tensor, *, joins: bool) -> list[tuple[int, Tensor]]:
    """Return the contiguous ranges of an HF dimension that this rank holds: first index, and indices in its part.

    Args:
        own: for each index of the HF dimension, the index in the part, or -1.
        joins: True if a range's indices may lie anywhere in the part; otherwise they must be consecutive.
    """
    is_start = torch.ones(own.numel(), dtype=torch.bool)
    is_start[1:] = (own[1:] < 0) != (own[:-1] < 0)
    if not joins:
        is_start[1:] |= own[1:] != own[:-1] + 1
    starts = [*is_start.nonzero().flatten().tolist(), own.numel()]
    ranges = [(begin, own[begin:end]) for begin, end in zip(starts[:-1], starts[1:], strict=True)]
    return [(begin, indices) for begin, indices in ranges if int(indices[0]) >= 0]


def _slices_of(whole_shape: tuple[int, ...], ranges: list[list[tuple[int, Tensor]]]) -> Iterator[ShardSlice]:
    column_ranges = ranges[1] if len(ranges) == 2 else None
    for first_row, indices in ranges[0]:
        rows = tuple(_affine(indices))
        if column_ranges is None:
            yield ShardSlice("", whole_shape, TensorSlice((first_row,), (indices.numel(),)), 0, rows)
            continue
        for first, columns in column_ranges:
            part = TensorSlice((first_row, first), (indices.numel(), columns.numel()))
            yield ShardSlice("", whole_shape, part, int(columns[0]), rows)


def _affine(indices: Tensor) -> Iterator[RowRuns]:
    """Express row numbers, in order, as few :class:`RowRuns`."""
    breaks = (indices[1:] != indices[:-1] + 1).nonzero().flatten() + 1
    begins = [0, *breaks.tolist()]
    runs = [
        (int(indices[begin]), end - begin) for begin, end in zip(begins, [*begins[1:], indices.numel()], strict=True)
    ]
    position = 0
    while position < len(runs):
        first, run = runs[position]
        count, stride, previous = run, 0, first
        position += 1
        # Runs of equal length and distance; the last may be shorter.
        while position < len(runs) and count % run == 0:
            begin, length = runs[position]
            distance = begin - previous
            if length > run or distance <= 0 or (stride and distance != stride):
                break
            stride, previous, count = distance, begin, count + length
            position += 1
        yield RowRuns(first, count, run, stride)
