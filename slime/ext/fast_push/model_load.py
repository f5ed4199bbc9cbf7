"""One model object and the buckets that it takes: through the plan, through its own loader, and checked after either.

The first push after the engine's start goes through the model's own loader wherever a tensor is whole, and what that
wrote is compared with what the plan would have written: so every engine proves its plan before it relies on it.
Slices of tensors that a loader wants whole, or together with others, are held until all of them have come.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

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
"""Memory that waiting tensors may take on each GPU."""

NamedTensors = list[tuple[str, Tensor]]


@dataclass
class Complete:
    """The tensors that can be loaded after a bucket has arrived."""

    direct: NamedTensors = field(default_factory=list)
    """Views of the bucket."""
    assembled: NamedTensors = field(default_factory=list)
    """Tensors that came in several buckets, or waited for a partner."""
    refused: set[str] = field(default_factory=set)
    """Tensors of which this bucket brought a slice that is not kept, for want of memory."""

    @property
    def tensors(self) -> NamedTensors:
        return [*self.direct, *self.assembled]


class HeldTensors:
    """Collects slices until a tensor, and all that must be loaded with it, is complete.

    Invariant: what waits is a copy, because the bucket that brought it will be overwritten.  A group of tensors is
    kept as a whole or refused as a whole, when the first slice of it comes.

    Args:
        groups: tensor to all the tensors that must be loaded together with it; one alone when it is missing.
    """

    def __init__(
        self, manifest: Manifest, groups: Mapping[str, frozenset[str]], *, limit_bytes: int = LIMIT_BYTES
    ) -> None:
        self._entries, self._groups, self._limit_bytes = manifest.by_name, groups, limit_bytes
        self._held: dict[str, Tensor] = {}
        self._missing: dict[str, int] = {}
        """Elements that have not come yet, of every tensor of a kept group."""
        self._refused: set[str] = set()
        self._num_bytes = 0

    def add(self, bucket: BucketEntry, flat: Tensor, names: Collection[str]) -> Complete:
        """Take those slices of a bucket that belong to ``names``."""
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
        """Return True when there is, or can be, memory for the group."""
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
    """The state of the current push in one model: the buckets it has loaded, and how."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.plan: LoadPlan | None = None
        self.problems: list[str] = []
        """Of the push under way."""
        self._is_proven = False
        self._tables: dict[int, tuple[CopyTable, list[PlannedItem]]] = {}
        self._taken: list[bytes] = []
        self._held: HeldTensors | None = None
        self._loaded: set[int] = set()
        self.holds_constants = False
        """The memory of the constant buckets is as a complete push left it, and this push has loaded none of them."""
        self._constants: Tensor | None = None
        """Digests of that memory after the last complete push."""
        self._constant_memory: list[tuple[DigestTable, Tensor]] | None = None
        self._pending: list[tuple[list[PlannedItem], Tensor]] = []
        """Copies made and how many bytes of each differ, which the device may still be counting."""

    def begin(self, manifest: Manifest) -> None:
        unpack(self.model)
        plan = self.plan
        if plan is None or plan.manifest.id != manifest.id or not plan.fits(self.model):
            # The old plan would keep memory alive that the parameters have left.
            plan = self.plan = None
            self._tables, self._taken, self._is_proven = {}, [], False
            self._constants = self._constant_memory = None
            plan = self.plan = LoadPlan(self.model, manifest)
        self.problems = list(plan.problems)
        self._held = HeldTensors(manifest, plan.groups)
        self._loaded, self._pending = set(), []
        with torch.no_grad():
            for fill in plan.fills:
                fill.target.copy_(fill.value)
            fill_parameters_with_nan(self.model, plan.unaccounted)
        now = None if self._constants is None else self._digest_constants()
        self.holds_constants = now is not None and self._constants is not None and torch.equal(now, self._constants)

    def taken(self) -> list[bytes]:
        """Return, for each bucket of the manifest, a byte for each slice: 1 where the model reads something of it."""
        plan, _ = self._begun()
        if not self._taken:
            for bucket in plan.manifest.buckets:
                judged = self._judged({part.name for part in bucket.slices})
                self._taken.append(
                    bytes(p.name in judged or (self._is_proven and plan.reads(p)) for p in bucket.slices)
                )
        return self._taken

    def has(self, index: int) -> bool:
        """Return True when the bucket of the current push was loaded."""
        return index in self._loaded

    def load(self, index: int, flat: Tensor) -> None:
        """Take one bucket; on a GPU the work may not be done when this returns."""
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
                f"{len(refused)} tensors ({', '.join(refused[:3])}) come in slices, must be whole for the engine's "
                "loader, and take more memory than waiting tensors may"
            )
        self._loaded.add(index)
        self.holds_constants = self.holds_constants and not bucket.is_constant

    def finish(self) -> None:
        """Rebuild what the model derives from its weights; wait for the device; collect what is wrong.

        Layers that SGLang repacks keep their loaded form, in which weights can be compared, until :meth:`commit`.
        """
        plan, held = self._begun()
        self.problems += [f"{name} did not come, or not all that belongs to it" for name in held.incomplete]
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
        """Give the model the form that it serves."""
        repack(self.model)

    def _trace_all_layers(self, wrong: LoadPlan) -> None:
        """Make another plan, without conclusions from layer to layer: more of them may be wrong."""
        manifest = wrong.manifest
        trace = trace_load(self.model, entries_to_load(manifest))
        plan = LoadPlan(self.model, manifest, trace)
        zeroed = trace.opaque if trace.has_lost_targets else ()  # the loader was tried on zeros, which may have stayed
        if missed := sorted((wrong.unused - plan.unused).union(zeroed)):
            self.problems.append(
                f"{len(missed)} tensors ({', '.join(missed[:3])}) were not loaded: the model's loader does not treat "
                "all layers alike; the next push knows"
            )
        self.plan, self._tables, self._taken, self._constant_memory = plan, {}, [], None

    def _digest_constants(self) -> Tensor | None:
        """Return digests of the memory of the constant buckets, int64; None where it is not known."""
        if has_repacked_layers(self.model):
            return None  # their memory is packed again in each push
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
        """Return the tensors among ``names`` that go through the model's own loader; the others go by the plan."""
        plan, _ = self._begun()
        return names & plan.stock.keys() if self._is_proven else names - plan.unused

    def _table(self, index: int, names: Set[str] | None = None) -> tuple[CopyTable, list[PlannedItem]]:
        """Return the copies of a bucket, or of some of its tensors; the table of all is kept."""
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
        """Load tensors by the model's own loader and check that they are where they should be."""
        plan, _ = self._begun()
        named_tensors = complete.tensors
        self.model.load_weights(list(named_tensors))  # type: ignore[operator]
        wrong = _names_elsewhere(*self._table(index, {name for name, _ in complete.direct}), flat)
        if complete.assembled:
            bucket, joined = packed(complete.assembled)
            wrong |= _names_elsewhere(*make_table(plan, bucket), joined)
        if wrong:
            logger.warning("the load plan is wrong for %s; the model's own loader takes over", sorted(wrong)[:5])
            plan.distrust(wrong, "the plan and the model's own loader disagree")
            self._tables = {}
        untraced = [(name, tensor) for name, tensor in named_tensors if name in plan.stock]
        if untraced:
            self._compare_in_scratch(untraced)

    def _compare_in_scratch(self, named_tensors: NamedTensors) -> None:
        """Load once more, into copies, and compare; see ``weight_check``."""
        plan, _ = self._begun()
        try:
            self.problems += differing_names(self.model, named_tensors, plan.untraced_parameters)
        except torch.OutOfMemoryError:
            logger.warning(
                "%d tensors are served unverified: comparing them takes more memory than there is", len(named_tensors)
            )


def make_table(
    plan: LoadPlan, bucket: BucketEntry, names: Set[str] | None = None
) -> tuple[CopyTable, list[PlannedItem]]:
    """Make one table of the copies of a bucket, or of some of its tensors."""
    planned = plan.items(bucket, names)
    return CopyTable([one.item for one in planned]), planned


def _names_elsewhere(table: CopyTable, planned: list[PlannedItem], flat: Tensor) -> set[str]:
    """Return the tensors that the model does not hold where the plan says."""
    counts = table.count_differences(flat).tolist() if planned else []
    return {one.name for one, count in zip(planned, counts, strict=True) if count}


def packed(named_tensors: NamedTensors) -> tuple[BucketEntry, Tensor]:
    """Return a bucket of whole tensors."""
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
