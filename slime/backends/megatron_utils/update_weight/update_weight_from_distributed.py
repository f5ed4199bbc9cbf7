"""Push to engines on GPUs of their own: each pipeline stage broadcasts its parameters over a process group.

The sender of a stage is its rank 0 of data and tensor parallelism; its group holds that rank and all GPUs of all
engines.  Stages take turns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from slime.backends.megatron_utils import cpu_platform  # noqa: F401

# isort: split
from megatron.core import mpu

from slime.backends.megatron_utils import memory, sglang
from slime.backends.megatron_utils.update_weight.sender import PushReport, WeightSender
from slime.backends.megatron_utils.update_weight.update_group import UpdateGroup
from slime.weights.named_tensors import NamedTensors
from slime.weights.receiver import WeightReceiver


class UpdateWeightFromDistributed(WeightSender):
    """Every engine through the process group of each pipeline stage."""

    across_stages = False

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._is_source = (
            mpu.get_data_parallel_rank(with_context_parallel=True) == 0 and mpu.get_tensor_model_parallel_rank() == 0
        )
        self._group = UpdateGroup(f"slime-pp_{mpu.get_pipeline_model_parallel_rank()}", self.timeout_s)

    def connect(self, receivers: Sequence[WeightReceiver]) -> None:
        """The source of each stage joins a group with all engines, one stage after the other."""
        sglang.prepare()
        for stage in range(mpu.get_pipeline_model_parallel_world_size()):
            is_turn = self._is_source and stage == mpu.get_pipeline_model_parallel_rank()
            self.run_together(
                f"joining the update group of pipeline stage {stage}",
                (lambda: self._group.connect(receivers)) if is_turn else None,
            )

    def update_weights(self) -> PushReport:
        """As the base class, with allocations outside the memory saver: the model may be asleep."""
        with memory.memory_saver_disabled():
            return super().update_weights()

    def offer(self, bucket: NamedTensors, version: str, *, compare: bool) -> Callable[[], None] | None:
        """The source of the stage broadcasts; the other ranks have helped to gather."""
        if not self._is_source:
            return None
        if compare:
            return lambda: self._group.compare(bucket, version)
        return lambda: self._group.broadcast(bucket, version)
