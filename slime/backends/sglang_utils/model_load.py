"""One model object and the buckets that it takes: through the plan, through its own loader, and checked after either.

The first push after the engine's start goes through the model's own loader wherever a tensor is whole, and what that
wrote is compared with what the plan would have written: so every engine proves its plan before it relies on it.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor, nn

from slime.backends.sglang_utils.held_tensors import Complete, HeldTensors, NamedTensors
from slime.backends.sglang_utils.load_plan import LoadPlan, PlannedItem
from slime.backends.sglang_utils.weight_check import differing_names, fill_parameters_with_nan, find_nan_in
from slime.utils.errors import WeightSyncError
from slime.weights.kernels.tables import CopyTable
from slime.weights.manifest import BucketEntry, Manifest, pack_whole

logger = logging.getLogger(__name__)


class ModelLoad:
    """The state of the current push in one model: the buckets it has loaded, and how.

    Args:
        model: an SGLang model on its device.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.plan: LoadPlan | None = None
        self.problems: list[str] = []
        """Of the push under way."""
        self._is_proven = False
        self._tables: dict[int, tuple[CopyTable, list[PlannedItem]]] = {}
        self._held: HeldTensors | None = None
        self._loaded: set[int] = set()
        self._pending: list[tuple[list[PlannedItem], Tensor]] = []
        """Copies made and how many bytes of each differ, which the device may still be counting."""

    def begin(self, manifest: Manifest) -> None:
        """Forget what was under way and prepare for the buckets of ``manifest``."""
        plan = self.plan
        if plan is None or plan.manifest.id != manifest.id or not plan.fits(self.model):
            # The old plan would keep memory alive that the parameters have left.
            plan = self.plan = None
            self._tables, self._is_proven = {}, False
            plan = self.plan = LoadPlan(self.model, manifest)
        self.problems = list(plan.problems)
        self._held = HeldTensors(manifest, plan.groups)
        self._loaded, self._pending = set(), []
        with torch.no_grad():
            for fill in plan.fills:
                fill.target.copy_(fill.value)
            fill_parameters_with_nan(self.model, plan.unaccounted)

    def has(self, index: int) -> bool:
        """True when the bucket of the current push was loaded."""
        return index in self._loaded

    def load(self, index: int, flat: Tensor) -> None:
        """Take one bucket; on a GPU the work may not be done when this returns."""
        plan, held = self._begun()
        bucket = plan.manifest.buckets[index]
        names = {part.name for part in bucket.slices}
        with torch.no_grad():
            if self._is_proven:
                if index not in self._tables:
                    self._tables[index] = make_table(plan, bucket)
                self._copy(*self._tables[index], flat)
                complete = held.add(bucket, flat, names & plan.stock.keys())
            else:
                complete = held.add(bucket, flat, names - plan.unused)
                self._copy(*make_table(plan, bucket, complete.refused), flat)
            if complete.tensors:
                self._load_by_model(bucket, flat, complete)
        refused = sorted(complete.refused & plan.stock.keys())
        if refused:
            self.problems.append(
                f"{len(refused)} tensors ({', '.join(refused[:3])}) come in slices, must be whole for the engine's "
                "loader, and take more memory than waiting tensors may"
            )
        self._loaded.add(index)

    def finish(self) -> None:
        """Rebuild what the model derives from its weights; wait for the device; collect what is wrong."""
        plan, held = self._begun()
        self.problems += [f"{name} did not come, or not all that belongs to it" for name in held.incomplete]
        rebuild = getattr(self.model, "post_load_weights", None)
        if rebuild is not None:
            with torch.no_grad():
                rebuild()
        self.problems += find_nan_in(self.model, plan.unaccounted)
        for planned, counts in self._pending:
            self.problems += _differences(planned, counts)
        self._pending = []
        self._held = HeldTensors(plan.manifest, plan.groups)
        is_complete = len(self._loaded) == len(plan.manifest.buckets)
        self._is_proven = self._is_proven or (is_complete and not self.problems)

    def _begun(self) -> tuple[LoadPlan, HeldTensors]:
        if self.plan is None or self._held is None:
            raise WeightSyncError("no push was begun on this model")
        return self.plan, self._held

    def _copy(self, table: CopyTable, planned: list[PlannedItem], flat: Tensor) -> None:
        if planned:
            table.copy(flat)
            self._pending.append((planned, table.count_differences(flat)))

    def _load_by_model(self, bucket: BucketEntry, flat: Tensor, complete: Complete) -> None:
        """Load tensors by the model's own loader and check that they are where they should be."""
        plan, _ = self._begun()
        named_tensors = complete.tensors
        self.model.load_weights(list(named_tensors))  # type: ignore[operator]
        wrong = self._names_elsewhere(bucket, flat, {name for name, _ in complete.direct})
        if complete.assembled:
            wrong |= self._names_elsewhere(*packed(complete.assembled), None)
        if wrong:
            logger.warning("the load plan is wrong for %s; the model's own loader takes over", sorted(wrong)[:5])
            plan.distrust(wrong, "the plan and the model's own loader disagree")
            self._tables = {}
        untraced = [(name, tensor) for name, tensor in named_tensors if name in plan.stock]
        if untraced:
            self._compare_in_scratch(untraced)

    def _names_elsewhere(self, bucket: BucketEntry, flat: Tensor, names: set[str] | None) -> set[str]:
        """Tensors that the model does not hold where the plan says."""
        plan, _ = self._begun()
        table, planned = make_table(plan, bucket, names)
        counts = table.count_differences(flat).tolist() if planned else []
        return {one.name for one, count in zip(planned, counts, strict=True) if count}

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
    plan: LoadPlan, bucket: BucketEntry, names: set[str] | None = None
) -> tuple[CopyTable, list[PlannedItem]]:
    """Make one table of the copies of a bucket, or of some of its tensors."""
    planned = plan.items(bucket, names)
    return CopyTable([one.item for one in planned]), planned


def packed(named_tensors: NamedTensors) -> tuple[BucketEntry, Tensor]:
    """Whole tensors in a bucket of their own."""
    _, bucket = pack_whole((name, tuple(tensor.shape), tensor.dtype) for name, tensor in named_tensors)
    flat = torch.zeros(bucket.num_bytes, dtype=torch.uint8, device=named_tensors[0][1].device)
    for part, (_, tensor) in zip(bucket.slices, named_tensors, strict=True):
        part.view(flat, tensor.dtype).copy_(tensor)
    return bucket, flat


def _differences(planned: list[PlannedItem], counts: Tensor) -> list[str]:
    return [
        f"{one.name}: {count} bytes of {one.item.dst.numel() * one.item.dst.element_size()} are not what was received"
        for one, count in zip(planned, counts.tolist(), strict=True)
        if count
    ]
