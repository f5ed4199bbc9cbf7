"""Push to engines on GPUs of their own: each pipeline stage broadcasts its parameters over a process group.

The sender of a stage is its rank 0 of data and tensor parallelism; its group holds that rank and all GPUs of all
engines.  Stages take turns.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from slime.ext.fast_push.groups import WeightGroup
from slime.weights.buckets import NO_BUCKET
from slime.weights.manifest import Manifest
from slime.weights.push.carrier import CarriedPush, Carrier
from slime.weights.push.engine import EngineProxy
from slime.weights.push.state import TrainerRanks


class DistributedCarrier(Carrier):
    """Every engine through the process group of each pipeline stage (NCCL; gloo on a CPU)."""

    by_stage = True

    def __init__(self, ranks: TrainerRanks) -> None:
        super().__init__(ranks)
        self._group = WeightGroup(f"slime-pp_{ranks.stage}")

    def connect(self, engines: Sequence[EngineProxy]) -> bool:
        """Do nothing: the groups form at the next push; until then the sources keep those of engines that stay."""
        self._group.engines = list(engines) if self.ranks.is_source else []
        return bool(engines)

    def open(self, push: CarriedPush, manifest: Manifest) -> None:
        """Join a group with all engines from the source of each stage, one stage after the other."""
        for stage in range(self.ranks.num_stages):
            is_turn = self.ranks.is_source and stage == self.ranks.stage
            push.run_together(
                f"joining the weight group of pipeline stage {stage}",
                (lambda: self._group.join(push)) if is_turn else None,
            )

    def send(self, push: CarriedPush, index: int, flat: Tensor) -> None:
        """Broadcast a bucket from the source of the stage; the other ranks have helped to gather."""
        if self.ranks.is_source and index != NO_BUCKET:
            self._group.send(push, index, flat)

    def close(self) -> None:
        """Leave all groups; collective only in that every rank should do it."""
        self._group.leave()
