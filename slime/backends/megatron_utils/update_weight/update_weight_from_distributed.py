"""Push to engines on GPUs of their own: each pipeline stage broadcasts its parameters over a process group.

The sender of a stage is its rank 0 of data and tensor parallelism; its group holds that rank and all GPUs of all
engines.  Stages take turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from slime.backends.megatron_utils import cpu_platform  # noqa: F401

# isort: split
from megatron.core import mpu

from slime.backends.megatron_utils import memory
from slime.backends.megatron_utils.update_weight.engines.remote_engines import RemoteEngines
from slime.backends.megatron_utils.update_weight.protocol.push import Push, PushReport
from slime.backends.megatron_utils.update_weight.sender import WeightSender
from slime.backends.megatron_utils.update_weight.sources.bucket_source import NO_BUCKET, BucketSource
from slime.backends.megatron_utils.update_weight.sources.shard_buckets import CollectedBuckets, ShardBuckets
from slime.weights.receiver import WeightReceiver


class UpdateWeightFromDistributed(WeightSender):
    """Every engine through the process group of each pipeline stage."""

    across_stages = False

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._is_source = (
            mpu.get_data_parallel_rank(with_context_parallel=True) == 0 and mpu.get_tensor_model_parallel_rank() == 0
        )
        self._remote = RemoteEngines(f"slime-pp_{mpu.get_pipeline_model_parallel_rank()}")

    def connect(self, receivers: Sequence[WeightReceiver]) -> None:
        """The groups form at the next push; until then the sources keep those of engines that stay."""
        self._remote.receivers = list(receivers) if self._is_source else []

    @property
    def sends_shards(self) -> bool:
        """Where all engines have our loader."""
        return bool(self.receivers) and all(receiver.acknowledges for receiver in self.receivers)

    def make_source(self) -> BucketSource:
        """Shards are joined on the source of the stage, which has a collective for each bucket and no other."""
        if not self._sends_shards:
            return self.make_plain_source()
        group = mpu.get_tensor_and_data_parallel_group(with_context_parallel=True)
        return CollectedBuckets(ShardBuckets(**self._source_options(), by_stage=True), group)

    def form_groups(self, push: Push) -> None:
        """The source of each stage joins a group with all engines, one stage after the other."""
        for stage in range(mpu.get_pipeline_model_parallel_world_size()):
            is_turn = self._is_source and stage == mpu.get_pipeline_model_parallel_rank()
            self.run_together(
                push,
                f"joining the weight group of pipeline stage {stage}",
                (lambda: self._remote.form(push)) if is_turn else None,
            )

    def _push(self) -> PushReport:
        """As the base class, with allocations outside the memory saver: the model may be asleep."""
        with memory.memory_saver_disabled():
            return super()._push()

    def offer(self, push: Push, index: int, flat: Tensor) -> None:
        """The source of the stage broadcasts; the other ranks have helped to gather."""
        if self._is_source and index != NO_BUCKET:
            self._remote.send(push, index, flat, self.source.manifest)

    def speaks_to(self, receiver: WeightReceiver) -> bool:
        """The source of a stage speaks to all engines."""
        return self._is_source

    def disconnect(self) -> None:
        """Leave all groups; collective only in that every rank should do it."""
        self._remote.leave()
