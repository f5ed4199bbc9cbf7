"""The verified push, slime's default: each rank sends what it holds to loaders inside the engines, which verify it.

``push`` implements its steps.  A carrier moves the buckets: through memory of the trainer's GPUs, by broadcast, or
over a disk (``slime.ext.fast_push.disk``).
"""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from slime.backends.megatron_utils import cpu_platform  # noqa: F401

# isort: split
from megatron.core import mpu

from slime.backends.megatron_utils import memory
from slime.backends.megatron_utils.hf_to_megatron.tensors import stored_names
from slime.backends.megatron_utils.model_transform import added_parameters
from slime.backends.megatron_utils.models import WeightMap
from slime.backends.megatron_utils.update_weight.plain_push import PlainPush
from slime.backends.megatron_utils.update_weight.transport import SentWeights, Transport
from slime.ext.fast_push.acknowledgements import DigestedBuckets
from slime.ext.fast_push.carrier import BucketSource, CarriedPush, Carrier
from slime.ext.fast_push.distributed import DistributedCarrier
from slime.ext.fast_push.gathered_buckets import GatheredBuckets
from slime.ext.fast_push.loaders import loader_of
from slime.ext.fast_push.manifest import Manifest, TensorEntry
from slime.ext.fast_push.push import push_weights
from slime.ext.fast_push.shard_buckets import CollectedBuckets, ShardBuckets
from slime.ext.fast_push.shared_memory import SharedMemoryCarrier
from slime.train_data.model_dims import ModelDims
from slime.utils.errors import WeightSyncError
from slime.weights.push.engine import EngineProxy
from slime.weights.push.state import Push, PushReport, TrainerRanks
from slime.weights.stored_tensors import STORED_DTYPES, read_layout

logger = logging.getLogger(__name__)


class VerifiedPush(Transport):
    """Pushes in two phases from one trainer rank."""

    def __init__(self, carrier: Carrier, ranks: TrainerRanks) -> None:
        self.carrier, self._ranks = carrier, ranks
        self._plain = PlainPush(ranks)
        self._is_plain = False
        """True if the current engines get the plain push."""
        self._weights: SentWeights | None = None
        self._takes_slices = False
        self._buckets: DigestedBuckets | None = None
        self._gathered: GatheredBuckets | None = None

    @classmethod
    def of(cls, args: Namespace, ranks: TrainerRanks) -> VerifiedPush:
        """Make the transport that the flags select."""
        if vars(args).get("update_weight_transport") == "disk":
            from slime.ext.fast_push.disk.delta_carrier import make_carrier
            from slime.ext.fast_push.disk.disk import DiskOptions

            return cls(make_carrier(args.update_weight_mode, ranks, DiskOptions.of(args)), ranks)
        return cls(SharedMemoryCarrier(ranks) if args.colocate else DistributedCarrier(ranks), ranks)

    def connect(self, engines: Sequence[EngineProxy], weights: SentWeights) -> None:
        """Connect the carrier to the engines, or the plain push if an engine lacks a loader that the carrier needs."""
        unverified = [engine.index for engine in engines if loader_of(engine) is None]
        self._is_plain = bool(unverified) and self.carrier.needs_loader
        if unverified and self._ranks.rank == 0:
            logger.warning(
                "Engines %s run without slime's loader: pushes to them are not verified%s; start them with "
                "slime's --custom-weight-loader (docs/engines.md)",
                unverified, ", and one that fails ends the push to all" if self._is_plain else "",
            )  # fmt: skip
        if self._is_plain:
            self._plain.connect(engines, weights)
            return
        takes_slices = self.carrier.connect(engines)
        if weights is not self._weights or takes_slices != self._takes_slices:
            self._weights, self._takes_slices = weights, takes_slices
            self._buckets = self._gathered = None

    def send(self, push: Push) -> PushReport:
        """Push; every engine that holds exactly what was sent then serves it, and the others are excluded."""
        if self._is_plain:
            return self._plain.send(push)
        gathered = self._gathered_buckets() if push.checks else None
        return push_weights(push, self.buckets, self.carrier, gathered)

    def write(self, push: Push) -> Any:
        """Let the carrier write the weights to disk; engines read them later."""
        carried = CarriedPush.of(push)
        try:
            written = self.carrier.write(carried, self.buckets)
        except WeightSyncError:
            self.carrier.finish(carried, is_served=False)
            raise
        return super().write(push) if written is None else written

    def close(self) -> None:
        self.carrier.close()
        self._plain.close()

    @property
    def buckets(self) -> DigestedBuckets:
        """The buckets of this model; made collectively at the first push."""
        if self._buckets is None:
            weights = self._weights
            assert weights is not None
            # Slices are read from the parameters, into which added ones (LoRA) are not merged.
            takes_slices = self._takes_slices and added_parameters(weights.model) is None
            source = self._slices(weights) if takes_slices else self._gathered_buckets()
            form = weights.form
            kept = left_out_tensors(form.folder, form.weight_map, form.dims, source.manifest)
            if kept and self._ranks.rank == 0:
                logger.info(
                    "Engines keep %d tensors of %s that this trainer does not have, such as %s",
                    len(kept), form.folder, kept[0].name,
                )  # fmt: skip
            self._buckets = DigestedBuckets(source, kept)
            if isinstance(source, ShardBuckets):
                source.record_digests = self._buckets.record
            memory.freeze_long_lived_objects()  # there are several per tensor
        return self._buckets

    def _gathered_buckets(self) -> GatheredBuckets:
        """Return whole tensors, right for every model, layout and engine; ``--check-weight-update-equal`` compares
        with them.
        """
        if self._gathered is None:
            assert self._weights is not None
            self._gathered = GatheredBuckets(self._weights, across_stages=not self.carrier.by_stage)
        return self._gathered

    def _slices(self, weights: SentWeights) -> BucketSource:
        """Return a source of each rank's slices; by stage, collected on the stage's source rank."""
        if not self.carrier.by_stage:
            return ShardBuckets(weights)
        group = mpu.get_tensor_and_data_parallel_group(with_context_parallel=True)
        return CollectedBuckets(ShardBuckets(weights, by_stage=True), group)


def left_out_tensors(
    folder: str, weight_map: WeightMap, shape: ModelDims, pushed: Manifest
) -> tuple[TensorEntry, ...]:
    """Return the checkpoint's tensors that are not pushed, because the trainer lacks their part of the model."""
    if not (weight_map.untrained or weight_map.spare or weight_map.mtp) or not stored_names(folder):
        return ()
    own = {entry.name for entry in pushed.tensors}
    dtypes = {code: name for name, code in STORED_DTYPES.items()}
    return tuple(
        TensorEntry(name, tuple(stored.shape), dtypes[stored.dtype])
        for name, stored in sorted(read_layout(folder).items())
        if weight_map.is_left_out(name, shape) and name not in own
    )
