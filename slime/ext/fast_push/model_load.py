"""Loads buckets into one model object, by the plan or through the model's own loader, and checks the result.

The first push after the engine's start uses the model's own loader for every tensor that arrives whole, and compares
the result with what the plan would have written.  So every engine proves its plan before it relies on it.
Slices of tensors that a loader needs whole, or together with others, are held until all of them have arrived.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from slime.ext.fast_push.kept_tensors import restore_kept
from slime.ext.fast_push.kernels.tables import CopyTable, DigestTable
from slime.ext.fast_push.load_plan import LoadPlan, PlannedItem, entries_to_load
from slime.ext.fast_push.load_trace import trace_load
from slime.ext.fast_push.manifest import BucketEntry, BucketSlice, Manifest, pack_whole
from slime.ext.fast_push.repacked_layers import has_repacked_layers, repack, unpack
from slime.ext.fast_push.weight_check import (
    differing_names,
    fill_parameters_with_nan,
    find_nan_in,
    rebuild_derived,
)
from slime.utils.errors import WeightSyncError

logger = logging.getLogger(__name__)

LIMIT_BYTES = 2 << 30
"""Memory in bytes that held tensors may take per GPU."""

NamedTensors = list[tuple[str, Tensor]]


@dataclass
class Complete:
    """The tensors that can be loaded once a bucket has arrived."""

    direct: NamedTensors = field(default_factory=list)
    """Views of the bucket."""
    assembled: NamedTensors = field(default_factory=list)
    """Tensors that arrived in several buckets or waited for a partner."""
    refused: set[str] = field(default_factory=set)
    """Tensors of which this bucket brought a slice that was dropped because memory is limited."""

    @property
    def tensors(self) -> NamedTensors:
        return [*self.direct, *self.assembled]


class HeldTensors:
    """Collects slices until a tensor, and all tensors that must be loaded with it, are complete.

    Held slices are copies, because their buckets will be overwritten.  A group of tensors is kept or refused as a
    whole, when its first slice arrives.

    Args:
        manifest: the push's manifest.
        groups: tensor -> all tensors that must be loaded together; a tensor without an entry is loaded alone.
        limit_bytes: memory that held tensors may take.
    """

    def __init__(
        self, manifest: Manifest, groups: Mapping[str, frozenset[str]], *, limit_bytes: int = LIMIT_BYTES
    ) -> None:
        self._entries, self._groups, self._limit_bytes = manifest.by_name, groups, limit_bytes
        self._held: dict[str, Tensor] = {}
        self._missing: dict[str, int] = {}
        """Tensor of a kept group -> number of elements that have not arrived."""
        self._refused: set[str] = set()
        self._num_bytes = 0

    def add(self, bucket: BucketEntry, flat: Tensor, names: Collection[str]) -> Complete:
        """Take the bucket's slices of the tensors in ``names``."""
        result = Complete()
        parts = [part for part in bucket.slices if part.name in names]
        whole = {part.name for part in parts if part.slice.sizes == self._entries[part.name].shape}
        touched: dict[str, None] = {}
        for part in parts:
            group = self._group(part.name)
            view = part.view(flat, self._entries[part.name].torch_dtype)
            if group <= whole:
                result.direct.append((part.name, view))
            elif self._keeps(group):
                self._insert(part, view)
                touched[part.name] = None
            else:
                result.refused.add(part.name)
        for name in touched:
            group = self._group(name)
            if name in self._held and not any(self._missing[member] for member in group):
                result.assembled += [(member, self._held[member]) for member in sorted(group)]
                self._drop(group)
        return result

    @property
    def incomplete(self) -> list[str]:
        return sorted(self._held)

    def _group(self, name: str) -> frozenset[str]:
        return self._groups.get(name, frozenset((name,)))

    def _keeps(self, group: frozenset[str]) -> bool:
        """Return True if the group is held or there is memory to hold it."""
        if any(name in self._refused for name in group):
            return False
        if any(name in self._missing for name in group):
            return True
        size = self._bytes_of(group)
        if self._num_bytes + size > self._limit_bytes:
            self._refused |= group
            return False
        self._num_bytes += size
        self._missing.update({name: math.prod(self._entries[name].shape) for name in group})
        return True

    def _insert(self, part: BucketSlice, view: Tensor) -> None:
        if part.name not in self._held:
            entry = self._entries[part.name]
            self._held[part.name] = torch.empty(entry.shape, dtype=entry.torch_dtype, device=view.device)
        part.slice.of(self._held[part.name]).copy_(view)
        self._missing[part.name] -= view.numel()

    def _drop(self, group: frozenset[str]) -> None:
        self._num_bytes -= self._bytes_of(group)
        for name in group:
            del self._held[name], self._missing[name]

    def _bytes_of(self, group: frozenset[str]) -> int:
        return sum(self._entries[name].num_bytes for name in group)


class ModelLoad:
    """State of the current push in one model: the buckets it has loaded, and how."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.plan: LoadPlan | None = None
        self.problems: list[str] = []
        """Problems of the current push."""
        self._is_proven = False
        self._tables: dict[int, tuple[CopyTable, list[PlannedItem]]] = {}
        self._taken: list[bytes] = []
        self._held: HeldTensors | None = None
        self._loaded: set[int] = set()
        self.holds_constants = False
        """True if the constant buckets' memory is as a complete push left it and this push has loaded none of them."""
        self._constants: Tensor | None = None
        """Digests of the constant buckets' memory after the last complete push."""
        self._constant_memory: list[tuple[DigestTable, Tensor]] | None = None
        self._pending: list[tuple[list[PlannedItem], Tensor]] = []
        """Copies made, and how many bytes of each differ (the device may still be counting)."""

    def begin(self, manifest: Manifest) -> None:
        unpack(self.model)
        plan = self.plan
        if plan is None or plan.manifest.id != manifest.id or not plan.fits(self.model):
            # Drop the old plan first: it would keep abandoned parameter memory alive.
            plan = self.plan = None
            self._tables, self._taken, self._is_proven = {}, [], False
            self._constants = self._constant_memory = None
            plan = self.plan = LoadPlan(self.model, manifest)
        self.problems = list(plan.problems)
        self._held = HeldTensors(manifest, plan.groups)
        self._loaded, self._pending = set(), []
        with torch.no_grad():
            restore_kept(self.model, manifest.kept)
            for fill in plan.fills:
                fill.target.copy_(fill.value)
            fill_parameters_with_nan(self.model, plan.unaccounted)
        now = None if self._constants is None else self._digest_constants()
        self.holds_constants = now is not None and self._constants is not None and torch.equal(now, self._constants)

    def taken(self) -> list[bytes]:
        """Return, per bucket of the manifest, one byte per slice: 1 if the model reads any of it."""
        plan, _ = self._begun()
        if not self._taken:
            for bucket in plan.manifest.buckets:
                judged = self._judged({part.name for part in bucket.slices})
                self._taken.append(
                    bytes(p.name in judged or (self._is_proven and plan.reads(p)) for p in bucket.slices)
                )
        return self._taken

    def has(self, index: int) -> bool:
        """Return True if the current push has loaded the bucket."""
        return index in self._loaded

    def load(self, index: int, flat: Tensor) -> None:
        """Load one bucket; asynchronous on a GPU."""
        plan, held = self._begun()
        bucket = plan.manifest.buckets[index]
        names = {part.name for part in bucket.slices}
        judged = self._judged(names)
        with torch.no_grad():
            complete = held.add(bucket, flat, judged)
            copied = None if judged <= plan.stock.keys() else names - judged | complete.refused
            self._copy(*self._table(index, copied), flat)
            if complete.tensors:
                self._load_by_model(index, flat, complete)
        refused = sorted(complete.refused & plan.stock.keys())
        if refused:
            self.problems.append(
                f"{len(refused)} tensors ({', '.join(refused[:3])}) arrive in slices, must be whole for the engine's "
                "loader, and take more memory than held tensors may"
            )
        self._loaded.add(index)
        self.holds_constants = self.holds_constants and not bucket.is_constant

    def finish(self) -> None:
        """Rebuild what the model derives from its weights, synchronize with the device, and collect problems.

        Layers that SGLang repacks stay in their loaded form, in which weights can be compared, until :meth:`commit`.
        """
        plan, held = self._begun()
        self.problems += [f"{name}, or a tensor loaded with it, did not arrive completely" for name in held.incomplete]
        rebuild_derived(self.model)
        self.problems += find_nan_in(self.model, plan.unaccounted)
        for planned, counts in self._pending:
            self.problems += _differences(planned, counts)
        self._pending = []
        self._held = HeldTensors(plan.manifest, plan.groups)
        present = self._loaded.union(plan.manifest.constants if self.holds_constants else ())
        is_complete = len(present) == len(plan.manifest.buckets)
        if plan.trace.is_concluded and plan.is_distrusted:
            self._trace_all_layers(plan)
        elif not self._is_proven and is_complete and not self.problems:
            self._is_proven, self._taken = True, []
        self._constants = self._digest_constants() if is_complete and not self.problems else None

    def commit(self) -> None:
        """Repack the model into the form that it serves."""
        repack(self.model)

    def _trace_all_layers(self, wrong: LoadPlan) -> None:
        """Replace the plan by one without inferred layers, because more of the inferences may be wrong."""
        manifest = wrong.manifest
        trace = trace_load(self.model, entries_to_load(manifest))
        plan = LoadPlan(self.model, manifest, trace)
        zeroed = trace.opaque if trace.has_lost_targets else ()  # the trace loaded real zeros, which may have stayed
        if missed := sorted((wrong.unused - plan.unused).union(zeroed)):
            self.problems.append(
                f"{len(missed)} tensors ({', '.join(missed[:3])}) were not loaded: the model's loader does not treat "
                "all layers alike; the next push takes that into account"
            )
        self.plan, self._tables, self._taken, self._constant_memory = plan, {}, [], None

    def _digest_constants(self) -> Tensor | None:
        """Return int64 digests of the constant buckets' memory; None if that memory is not known exactly."""
        if has_repacked_layers(self.model):
            return None  # each push repacks their memory
        if self._constant_memory is None:
            plan, _ = self._begun()
            memory = plan.constant_memory()
            if memory is None:
                return None
            self._constant_memory = [(DigestTable([0], [flat.numel()], flat.device), flat) for flat in memory]
        digests = [table.run(flat) for table, flat in self._constant_memory]
        return torch.cat(digests) if digests else torch.empty(0, dtype=torch.int64)

    def _begun(self) -> tuple[LoadPlan, HeldTensors]:
        if self.plan is None or self._held is None:
            raise WeightSyncError("no push was begun on this model")
        return self.plan, self._held

    def _judged(self, names: Set[str]) -> Set[str]:
        """Return the tensors among ``names`` to load with the model's own loader; the others follow the plan."""
        plan, _ = self._begun()
        return names & plan.stock.keys() if self._is_proven else names - plan.unused

    def _table(self, index: int, names: Set[str] | None = None) -> tuple[CopyTable, list[PlannedItem]]:
        """Return the copy table of a bucket (cached), or of only some of its tensors."""
        plan, _ = self._begun()
        bucket = plan.manifest.buckets[index]
        if names is not None and not all(p.name in names for p in bucket.slices if p.name in plan.writes):
            return make_table(plan, bucket, names)
        if index not in self._tables:
            self._tables[index] = make_table(plan, bucket)
        return self._tables[index]

    def _copy(self, table: CopyTable, planned: list[PlannedItem], flat: Tensor) -> None:
        if planned:
            table.copy(flat)
            self._pending.append((planned, table.count_differences(flat)))

    def _load_by_model(self, index: int, flat: Tensor, complete: Complete) -> None:
        """Load tensors with the model's own loader and check that they are where the plan says."""
        plan, _ = self._begun()
        named_tensors = complete.tensors
        self.model.load_weights(list(named_tensors))  # type: ignore[operator]
        wrong = _names_elsewhere(*self._table(index, {name for name, _ in complete.direct}), flat)
        if complete.assembled:
            bucket, joined = packed(complete.assembled)
            wrong |= _names_elsewhere(*make_table(plan, bucket), joined)
        if wrong:
            logger.warning("The load plan is wrong for %s; the model's own loader takes over", sorted(wrong)[:5])
            plan.distrust(wrong, "the plan and the model's own loader disagree")
            self._tables = {}
        untraced = [(name, tensor) for name, tensor in named_tensors if name in plan.stock]
        if untraced:
            self._compare_in_scratch(untraced)

    def _compare_in_scratch(self, named_tensors: NamedTensors) -> None:
        """Load again, into copies of the parameters, and compare; see ``weight_check``."""
        plan, _ = self._begun()
        try:
            self.problems += differing_names(self.model, named_tensors, plan.untraced_parameters)
        except torch.OutOfMemoryError:
            logger.warning(
                "%d tensors are served unverified: there is not enough memory to compare them", len(named_tensors)
            )


def make_table(
    plan: LoadPlan, bucket: BucketEntry, names: Set[str] | None = None
) -> tuple[CopyTable, list[PlannedItem]]:
    """Make one table of a bucket's copies, or of only some of its tensors."""
    planned = plan.items(bucket, names)
    return CopyTable([one.item for one in planned]), planned


def _names_elsewhere(table: CopyTable, planned: list[PlannedItem], flat: Tensor) -> set[str]:
    """Return the tensors that are not in the model where the plan says."""
    counts = table.count_differences(flat).tolist() if planned else []
    return {one.name for one, count in zip(planned, counts, strict=True) if count}


def packed(named_tensors: NamedTensors) -> tuple[BucketEntry, Tensor]:
    """Pack whole tensors into a bucket; return its entry and its buffer."""
    _, bucket = pack_whole((name, tuple(tensor.shape), tensor.dtype) for name, tensor in named_tensors)
    flat = torch.zeros(bucket.num_bytes, dtype=torch.uint8, device=named_tensors[0][1].device)
    for part, (_, tensor) in zip(bucket.slices, named_tensors, strict=True):
        part.view(flat, tensor.dtype).copy_(tensor)
    return bucket, flat


def _differences(planned: list[PlannedItem], counts: Tensor) -> list[str]:
    if not counts.any():
        return []
    return [
        f"{one.name}: {count} bytes of {one.item.dst.numel() * one.item.dst.element_size()} are not what was received"
        for one, count in zip(planned, counts.tolist(), strict=True)
        if count
    ]
