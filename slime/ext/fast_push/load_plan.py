"""Plans the copies that load a bucket, from a trace of the model's ``load_weights``, and finds unfilled parameters.

From the trace (``load_trace``) fused qkv and gate/up, stacked experts and tensor-parallel slices are known for any
model family, without a word about it here.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from slime.backends.sglang_utils.sglang_plugin import is_own_scale
from slime.ext.fast_push.alike_layers import trace_by_layers
from slime.ext.fast_push.kernels.tables import CopyItem
from slime.ext.fast_push.load_trace import LoadTrace, Write
from slime.ext.fast_push.manifest import BucketEntry, BucketSlice, Manifest, TensorEntry
from slime.ext.fast_push.strided_copy import (
    NotRectangularError,
    StridedCopy,
    StridedSlice,
    clip,
    merged,
    slice_written,
)
from slime.weights.tensor_slice import TensorSlice

logger = logging.getLogger(__name__)

_DESCRIPTION = re.compile(r"(weight_shape|g_idx|g_idx_sort_indices)$")
Fingerprint = tuple[tuple[str, int, tuple[int, ...], tuple[int, ...], torch.dtype], ...]


@dataclass(frozen=True)
class PlannedItem:
    """One copy from a bucket into the model."""

    name: str
    """Name of the HF tensor that is copied."""
    position: int
    """Position in the bucket of the slice that it reads."""
    item: CopyItem


class LoadPlan:
    """The copies that load one manifest's tensors into one model object.

    Invariant: at most one copy writes an element of a parameter, except for parameters named in :attr:`problems`.
    The plan points into the parameters' memory and is invalid once that moves; see :meth:`fits`.

    Args:
        model: has a ``load_weights``; its parameters are not changed.
        manifest: the tensors and buckets to load.
        trace: a trace of the model's loader on these tensors; None to make one.
    """

    def __init__(self, model: nn.Module, manifest: Manifest, trace: LoadTrace | None = None) -> None:
        self.manifest = manifest
        self._fingerprint = fingerprint(model)
        entries = entries_to_load(manifest)
        self.trace = trace = trace or trace_by_layers(model, entries)
        self.is_distrusted = False
        """True if the model's own loader disagreed with the plan on some tensor."""
        self.fills = trace.fills
        self.writes: dict[str, list[Write]] = {}
        self.stock: dict[str, str] = {}
        """Tensor that the model's own loader must load -> reason."""
        self.groups = _joined(trace.partners)
        """Tensor -> all tensors, itself included, that the model loads together."""
        self.is_traced = not trace.unknown
        if trace.unknown:
            logger.warning("Every push to this engine will use its model's own loader: %s", trace.unknown)
            self.stock = dict.fromkeys(manifest.by_name, trace.unknown)
            self.fills = []
        else:
            for write in trace.writes:
                self.writes.setdefault(write.name, []).append(write)
            for name, reason in trace.opaque.items():
                self._leave([name], reason)
        if not hasattr(model, "post_load_weights"):
            self._leave_sources_of_derived(trace)
        self._leave_what_slices_do_not_make()
        taken = self.writes.keys() | self.groups.keys() | self.stock.keys() | trace.failures.keys()
        self.unused = frozenset(manifest.by_name) - taken
        """Tensors that this model does not load: experts and layers of other ranks, or parts of another model."""
        shapes = {entry.name: list(entry.shape) for entry in entries}
        self.problems = [
            f"{name} {shapes[name]} does not fit the engine's model: {reason}"
            for name, reason in trace.failures.items()
        ]
        self.unwritten: dict[str, str] = {}
        """Parameter that no pushed or kept tensor fills completely -> sentence that says how much is missing."""
        self.unaccounted: frozenset[str] = frozenset()
        """Parameters that can be checked only after the load, by looking for elements that were not written."""
        self.written_memory = frozenset(write.target.untyped_storage().data_ptr() for write in trace.writes)
        """Addresses of storages that the plan writes to."""
        self.untraced_parameters: frozenset[str] | None = None
        """Parameters that :attr:`stock` tensors may go to; None if any."""
        if self.is_traced:
            doubled, self.unwritten = _coverage(model, trace)
            self.problems += doubled
            self._note_untraced(model, trace)

    def _note_untraced(self, model: nn.Module, trace: LoadTrace) -> None:
        """Assume that tensors whose trace ended in an error fill the parameters that nothing else fills."""
        memory = {target.untyped_storage().data_ptr() for target in trace.opaque_targets}
        memory |= {w.target.untyped_storage().data_ptr() for w in trace.writes if w.name in self.stock}
        places = {name for name, p in model.named_parameters() if p.untyped_storage().data_ptr() in memory}
        self.untraced_parameters = frozenset(places | self.unwritten.keys())
        if trace.has_lost_targets:
            self.unaccounted, self.unwritten = frozenset(self.unwritten), {}

    def _leave_sources_of_derived(self, trace: LoadTrace) -> None:
        """Leave to the model tensors from which its loader derives other weights, if it cannot rederive them alone."""
        sources = [
            name
            for name, writes in self.writes.items()
            if any(write.target.untyped_storage().data_ptr() in trace.derived_from for write in writes)
        ]
        self._leave(sources, "the model's loader derives other weights from it")

    def _leave_what_slices_do_not_make(self) -> None:
        """Leave to the model tensors that arrive in slices if its loader reads parts that are not slices."""
        shapes = {name: entry.shape for name, entry in self.manifest.by_name.items()}
        parts = [part for bucket in self.manifest.buckets for part in bucket.slices]
        for name in {part.name for part in parts if part.slice.sizes != shapes[part.name]}:
            if not all(_reads_slices(write.copy, shapes[name]) for write in self.writes.get(name, ())):
                self._leave([name], "the model's loader reads parts of it that are not slices")

    def _leave(self, names: Iterable[str], reason: str) -> None:
        """Let the model's own loader load these tensors and their groups."""
        for name in names:
            for member in self.groups.get(name, {name}):
                self.writes.pop(member, None)
                self.stock.setdefault(member, reason)

    def constant_memory(self) -> list[Tensor] | None:
        """Return, as uint8 views, the storages that constant buckets are loaded to; None if that is not exact."""
        buckets = self.manifest.buckets
        names = {part.name for index in self.manifest.constants for part in buckets[index].slices}
        if not names:
            return []
        if names & self.stock.keys():
            return None
        own, others = dict[int, Tensor](), set[int]()
        for name, writes in self.writes.items():
            for write in writes:
                storage = write.target.untyped_storage()
                if name in names:
                    own[storage.data_ptr()] = torch.empty(0, dtype=torch.uint8, device=write.target.device).set_(
                        storage
                    )
                else:
                    others.add(storage.data_ptr())
        return None if own.keys() & others else list(own.values())

    def fits(self, model: nn.Module) -> bool:
        return self._fingerprint == fingerprint(model)

    def distrust(self, names: Iterable[str], reason: str) -> None:
        """Let the model's own loader load these tensors and their groups in future pushes."""
        self._leave(names, reason)
        self.untraced_parameters, self.is_distrusted = None, True

    def items(self, bucket: BucketEntry, names: Collection[str] | None = None) -> list[PlannedItem]:
        """Return the copies that load a bucket, or only the tensors in ``names``."""
        found = []
        for position, part in enumerate(bucket.slices):
            if names is not None and part.name not in names:
                continue
            for write in self.writes.get(part.name, ()):
                copies = map(_merged, self._copies_of(part, write))
                found += [PlannedItem(part.name, position, _item(copy, write, part.offset)) for copy in copies]
        return found

    def reads(self, part: BucketSlice) -> bool:
        return any(self._copies_of(part, write) for write in self.writes.get(part.name, ()))

    def _copies_of(self, part: BucketSlice, write: Write) -> list[StridedCopy]:
        shape = self.manifest.by_name[part.name].shape
        if part.slice.sizes == shape:
            return [write.copy]
        return clip(write.copy, StridedSlice.whole(shape), StridedSlice.packed(part.slice))


def entries_to_load(manifest: Manifest) -> list[TensorEntry]:
    """Return the pushed and kept tensors that a loader should place."""
    return [entry for entry in (*manifest.tensors, *manifest.kept) if not is_description(entry.name)]


def fingerprint(model: nn.Module) -> Fingerprint:
    """Return name, address, shape, strides and dtype of every parameter."""
    return tuple((name, p.data_ptr(), tuple(p.shape), p.stride(), p.dtype) for name, p in model.named_parameters())


_merged = functools.lru_cache(1 << 14)(merged)
"""Cached, because experts and layers are alike: a few hundred distinct copies load tens of thousands of tensors."""


@functools.lru_cache(1 << 14)
def _reads_slices(copy: StridedCopy, shape: tuple[int, ...]) -> bool:
    whole = StridedSlice.whole(shape)
    try:
        clip(copy, whole, whole)
    except NotRectangularError:
        return False
    return True


def _item(copy: StridedCopy, write: Write, slice_offset: int) -> CopyItem:
    target = write.target.as_strided(copy.shape, copy.to_strides, copy.to_offset)
    offset = slice_offset + copy.from_offset * write.source_dtype.itemsize
    return CopyItem(target, offset, copy.from_strides, write.source_dtype)


def _joined(partners: Iterable[frozenset[str]]) -> dict[str, frozenset[str]]:
    """Merge sets that share a member; return member -> its merged set."""
    groups: dict[str, frozenset[str]] = {}
    for names in partners:
        union = names.union(*(groups.get(name, frozenset()) for name in names))
        groups.update(dict.fromkeys(union, union))
    return groups


# --- what a push leaves unwritten, or writes twice ----------------------------------------------------------------


def is_description(name: str) -> bool:
    """Return True for descriptions of packed integers (shape, column order), which an engine has from its start.

    Matrices that an engine fuses share one such shape, and no kernel reads it.
    """
    return _DESCRIPTION.search(name) is not None


def unread_memory(model: nn.Module) -> list[Tensor]:
    """Return views of parameters that SGLang creates but never reads; checkpoints may lack them.

    A sparse-attention layer has an indexer even if it reuses the previous layer's keys (except in a draft model, which
    reads it).  A layer that attends to another layer's keys and values has unused key and value rows after its query
    rows.
    """
    found: list[Tensor] = []
    module: Any
    for module in model.modules():
        own = vars(module)
        if own.get("skip_topk") and not own.get("is_nextn"):
            found += (parameter.detach() for parameter in module.indexer.parameters())
        if own.get("is_kv_shared_layer"):
            part = module.q_size / (module.q_size + 2 * module.kv_size)
            found += (parameter.detach() for parameter in module.k_norm.parameters())
            for parameter in module.qkv_proj.parameters():
                dim = getattr(parameter, "output_dim", 0)  # block scales have one row per block
                first = math.ceil(parameter.size(dim) * part)
                found.append(parameter.detach().narrow(dim, first, parameter.size(dim) - first))
    return found


def _coverage(model: nn.Module, trace: LoadTrace) -> tuple[list[str], dict[str, str]]:
    """Return one sentence per parameter with elements written twice, and parameter -> sentence for unwritten ones."""
    by_memory: dict[int, list[Write]] = {}
    for write in trace.writes:
        by_memory.setdefault(write.target.untyped_storage().data_ptr(), []).append(write)
    filled = [fill.target for fill in trace.fills]
    excused = [*filled, *trace.opaque_targets, *unread_memory(model)]
    doubled, unwritten = [], {}
    counts: dict[Any, tuple[int, int]] = {}  # cached, because layers are alike
    for name, parameter in model.named_parameters():
        if not parameter.numel():
            continue
        memory = parameter.untyped_storage().data_ptr()
        writes = by_memory.get(memory, [])
        also = [target for target in excused if target.untyped_storage().data_ptr() == memory]
        geometry = (parameter.shape, parameter.stride(), int(parameter.storage_offset()))
        alike = (geometry, tuple(write.copy for write in writes), tuple(map(_copy_to, also)))
        if alike not in counts:
            counts[alike] = _count(parameter, writes, also)
        num_missing, num_twice = counts[alike]
        if num_twice:
            sources = sorted({write.name for write in writes})
            doubled.append(
                f"{name}: {num_twice} of {parameter.numel()} elements are written more than once, by "
                f"{', '.join(sources[:4])}{' ...' if len(sources) > 4 else ''}"
            )
        is_own = num_missing == parameter.numel() and (is_own_scale(name) or is_description(name))
        if num_missing and not is_own:
            unwritten[name] = f"{name}: no tensor of the push fills {num_missing} of {parameter.numel()} elements"
    return doubled, unwritten


def _count(parameter: Tensor, writes: Sequence[Write], excused: Sequence[Tensor]) -> tuple[int, int]:
    """Return how many elements of a parameter nothing writes, and how many are written more than once."""
    whole = StridedSlice.whole(parameter.shape, parameter.stride())
    try:
        written = [_slice_of(parameter, write.copy, whole) for write in writes]
        others = [_slice_of(parameter, _copy_to(target), whole) for target in excused]
    except NotRectangularError:
        return _count_each(parameter, [write.copy for write in writes], excused)
    return _count_cells(tuple(parameter.shape), written, others)


def _copy_to(target: Tensor) -> StridedCopy:
    zeros = (0,) * target.dim()
    return StridedCopy(tuple(target.shape), int(target.storage_offset()), target.stride(), 0, zeros)


def _slice_of(parameter: Tensor, copy: StridedCopy, whole: StridedSlice) -> TensorSlice:
    offset = copy.to_offset - int(parameter.storage_offset())
    if offset < 0:
        raise NotRectangularError
    moved = StridedCopy(copy.shape, offset, copy.to_strides, copy.from_offset, copy.from_strides)
    return slice_written(moved, whole).slice


def _count_cells(
    shape: tuple[int, ...], written: Sequence[TensorSlice], excused: Sequence[TensorSlice]
) -> tuple[int, int]:
    """Count by cells: the slices' edges cut the parameter into cells, each entirely inside or outside each slice."""
    cuts: list[list[int]] = []
    for dim, size in enumerate(shape):
        edges = {0, size}
        for part in (*written, *excused):
            edges |= {part.offsets[dim], part.offsets[dim] + part.sizes[dim]}
        cuts.append(sorted(edges))
    position = [{edge: index for index, edge in enumerate(edges)} for edges in cuts]
    count = torch.zeros([len(edges) - 1 for edges in cuts], dtype=torch.int32)
    covered = torch.zeros_like(count, dtype=torch.bool)

    def cells_of(part: TensorSlice) -> tuple[slice, ...]:
        return tuple(
            slice(position[dim][part.offsets[dim]], position[dim][part.offsets[dim] + part.sizes[dim]])
            for dim in range(len(shape))
        )

    for part in written:
        count[cells_of(part)] += 1
    for part in excused:
        covered[cells_of(part)] = True
    volume = torch.ones_like(count, dtype=torch.int64)
    for dim, sorted_edges in enumerate(cuts):
        extents = torch.tensor([high - low for low, high in itertools.pairwise(sorted_edges)])
        volume *= extents.view([-1 if d == dim else 1 for d in range(len(shape))])
    missing = (count == 0) & ~covered
    return int(volume[missing].sum()), int(volume[count > 1].sum())


def _count_each(parameter: Tensor, copies: Sequence[StridedCopy], excused: Sequence[Tensor]) -> tuple[int, int]:
    """Count element by element, for writes that are not slices; takes one byte of host memory per element."""
    span = parameter.untyped_storage().nbytes() // parameter.element_size()
    count = torch.zeros(span, dtype=torch.uint8)
    for copy in copies:
        count.as_strided(copy.shape, copy.to_strides, copy.to_offset).add_(1)
    own = count.as_strided(parameter.shape, parameter.stride(), parameter.storage_offset())
    num_twice = int((own > 1).sum())
    for target in excused:
        count.as_strided(target.shape, target.stride(), target.storage_offset()).fill_(1)
    return int((own == 0).sum()), num_twice
