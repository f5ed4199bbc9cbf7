"""The pushes of one trainer rank: its place among the ranks, its buckets, the transport that the flags ask for."""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slime.backends.megatron_utils import cpu_platform  # noqa: F401

# isort: split
from megatron.core import mpu

from slime.backends.megatron_utils import memory, sglang
from slime.backends.megatron_utils.flags.model_dims import model_dims
from slime.backends.megatron_utils.hf_to_megatron.tensors import left_out_tensors
from slime.backends.megatron_utils.megatron_to_hf import checkpoint_quantizer
from slime.backends.megatron_utils.model_transform import added_parameters
from slime.backends.megatron_utils.models import find_weight_map
from slime.backends.megatron_utils.parameters import frozen_tower
from slime.backends.megatron_utils.update_weight.bucket_source import GatheredBuckets, SentWeights
from slime.backends.megatron_utils.update_weight.cast_loss import CastLossEstimate
from slime.backends.megatron_utils.update_weight.gather import HostWeights
from slime.backends.megatron_utils.update_weight.shard_buckets import CollectedBuckets, ShardBuckets
from slime.utils.errors import HookError, WeightSyncError
from slime.utils.misc import load_function
from slime.weights.buckets import BucketSource
from slime.weights.named_tensors import pushed_dtype
from slime.weights.push.acknowledgements import DigestedBuckets
from slime.weights.push.participants import ExcludedEngine, Participants, PushClock
from slime.weights.push.push import push_weights
from slime.weights.push.state import Push, PushReport, TrainerRanks
from slime.weights.push.transports import TRANSPORTS
from slime.weights.push.transports.base import DiskOptions, Transport, TransportOptions
from slime.weights.push.transports.disk import DiskTransport, WrittenVersion
from slime.weights.push.verbs import RECEIVER, EngineProxy

logger = logging.getLogger(__name__)


class WeightUpdater:
    """Pushes the weights of a model to engines.

    Invariant: all trainer ranks call the same methods in the same order.  A version number is used for the same bytes
    only.

    Args:
        args: the run's arguments.
        model: this rank's chunks.
        weights_getter: host copies to send instead of the model's own weights; None sends these.
        hf_config: of ``--hf-checkpoint``: the quantisation of the engines' weights.
        first_version: versions count on from here, so that those of a resumed run stay above what its buffer holds.
    """

    def __init__(
        self,
        args: Namespace,
        model: Sequence[torch.nn.Module],
        weights_getter: Callable[[], HostWeights | None],
        *,
        hf_config: Mapping[str, Any],
        first_version: int = 0,
    ) -> None:
        self.args, self.version = args, first_version
        self.engines: list[EngineProxy] = []
        self.excluded: list[ExcludedEngine] = []
        """The engines that the last push excluded, also when it raised."""
        self.report: PushReport | None = None
        """Of the last push that engines took."""
        self._model, self._weights_getter, self._hf_config = model, weights_getter, hf_config
        self._added = added_parameters(model)
        self._transport: Transport | None = None
        self._takes_slices = False
        self._buckets: DigestedBuckets | None = None
        self._plain_source: BucketSource | None = None
        self._dtype = pushed_dtype((), args.params_dtype)
        self._cast_loss: CastLossEstimate | None = None
        self._have_weights_changed = True  # it may: what a process before this one called first_version is not known

    def connect(self, engines: Sequence[EngineProxy], num_new_engines: int) -> None:
        """Take ``engines`` as those to push to from now on; nothing happens when none of them is new."""
        if num_new_engines == 0:
            return
        self.engines = list(engines)
        if self._pushes_alone:
            return
        unverified = [engine.index for engine in engines if not engine.acknowledges]
        if unverified and dist.get_rank() == 0:
            logger.warning(
                "engines %s run without our loader: pushes to them are not verified, and one that breaks a broadcast "
                "takes the others with it; start them with --custom-weight-loader %s",
                unverified, RECEIVER,
            )  # fmt: skip
        if (takes_slices := self.transport.connect(engines)) != self._takes_slices:
            self._buckets, self._takes_slices = None, takes_slices
        if (dtype := pushed_dtype([engine.dtype for engine in engines], self.args.params_dtype)) != self._dtype:
            self._buckets = self._plain_source = self._cast_loss = None
            self._dtype = dtype
        memory.freeze_long_lived_objects()  # the first connection imports SGLang

    def record_weights_changed(self) -> None:
        """Record that the model was trained since the last push; call on all ranks."""
        self._have_weights_changed = True

    def push(self) -> PushReport:
        """Push the present weights to all engines, as the next version.

        Raises:
            WeightSyncError: no engine is connected, or the push failed; see ``push_weights``.
        """
        self.version += 1
        return self._push()

    def resend(self) -> PushReport:
        """Push to engines that missed the last push; the others are not connected meanwhile.

        Under the last push's version; under the next one if the model was trained since, or this process has not
        pushed yet: then these may be other bytes.

        Raises:
            WeightSyncError: as :meth:`push`.
        """
        if self._have_weights_changed:
            self.version += 1
        return self._push(is_resend=True)

    def write(self) -> WrittenVersion:
        """Write the present weights as the next version, and ask nothing of any engine: the driver will.

        Raises:
            WeightSyncError: this run's pushes do not go over a disk, or the disk or the hook refuses.
        """
        transport = self.transport
        if not isinstance(transport, DiskTransport):
            raise WeightSyncError("pushes of this run are not written to disk; use --update-weight-transport disk")
        self.version += 1
        push = self._new_push()
        try:
            self._estimate_cast_loss(push)
            return transport.write(push, self.buckets)
        except WeightSyncError:
            transport.finish(push, is_served=False)
            raise

    def close(self) -> None:
        """Leave the groups with the engines; every rank should do it."""
        if self._transport is not None:
            self._transport.close()

    @property
    def _pushes_alone(self) -> bool:
        return self._added is not None and self._added.pushes_alone

    @property
    def transport(self) -> Transport:
        """The one that the flags ask for; made at the first connection, collectively."""
        if self._transport is None:
            options = TransportOptions(
                ranks=trainer_ranks(self.args), wire=sglang, disk=disk_options(self.args, self._call_hook)
            )
            self._transport = TRANSPORTS[transport_name(self.args)](options)
        return self._transport

    @property
    def buckets(self) -> DigestedBuckets:
        """The buckets of this model; made at the first push, collectively."""
        if self._buckets is None:
            takes_slices = self._takes_slices and self._added is None  # slices are read from the weights
            source = self._slices() if takes_slices else self.make_plain_source()
            weight_map = find_weight_map(model_name(self.args, self._hf_config))
            kept = left_out_tensors(self.args.hf_checkpoint, weight_map, model_dims(self.args), source.manifest)
            if kept and dist.get_rank() == 0:
                logger.info(
                    "engines keep %d tensors of %s that this trainer does not have, such as %s",
                    len(kept), self.args.hf_checkpoint, kept[0].name,
                )  # fmt: skip
            self._buckets = DigestedBuckets(source, kept)
            if isinstance(source, ShardBuckets):
                source.record_digests = self._buckets.record
            memory.freeze_long_lived_objects()  # some for each of the model's tensors
        return self._buckets

    def make_plain_source(self) -> GatheredBuckets:
        """Return whole tensors, gathered: right for every model, layout and engine; collective."""
        return GatheredBuckets(self._sent_weights(), across_stages=not self.transport.by_stage)

    def _slices(self) -> BucketSource:
        """Return what each rank holds; by stage it is joined on the stage's source, one collective for each bucket."""
        if not self.transport.by_stage:
            return ShardBuckets(self._sent_weights())
        group = mpu.get_tensor_and_data_parallel_group(with_context_parallel=True)
        return CollectedBuckets(ShardBuckets(self._sent_weights(), by_stage=True), group)

    def _sent_weights(self) -> SentWeights:
        args, dtype = self.args, self._dtype
        return SentWeights(
            args=args,
            model=self._model,
            get_host_weights=self._weights_getter,
            model_name=model_name(args, self._hf_config),
            dtype=dtype,
            quantizer=checkpoint_quantizer(args.hf_checkpoint, self._quantization, dtype=dtype),
            bucket_bytes=args.update_weight_buffer_size,
            constants=frozenset().union(*trainer_ranks(args).gather(frozen_tower(self._model))),
        )

    @property
    def _quantization(self) -> dict[str, Any] | None:
        return self._hf_config.get("quantization_config")

    def _new_push(self, *, is_resend: bool = False) -> Push:
        clock = PushClock(float(self.args.weight_update_timeout_s))
        return Push(
            str(self.version),
            Participants(self.engines, clock),
            trainer_ranks(self.args),
            repacks=(self._quantization or {}).get("quant_method") == "compressed-tensors",
            checks=self.args.check_weight_update_equal,
            is_resend=is_resend,
        )

    def _push(self, *, is_resend: bool = False) -> PushReport:
        if self._transport is None and not (self._pushes_alone and self.engines):
            raise WeightSyncError("no engine is connected to this trainer; call connect_rollout_engines first")
        self._have_weights_changed, self.excluded = False, []
        push = self._new_push(is_resend=is_resend)
        try:
            if self._transport is None:
                assert self._added is not None
                self.report = self._added.push(push, self._model, self._dtype, self._weights_getter())
                return self.report
            self._estimate_cast_loss(push)
            plain = self._plain() if push.checks else None
            self.report = push_weights(push, self.buckets, self._transport, plain)
            return self.report
        finally:
            self.excluded = list(push.participants.excluded)

    def _estimate_cast_loss(self, push: Push) -> None:
        """Measure what this rank's weights lose by the cast, and warn on rank 0."""
        if self._cast_loss is None:
            self._cast_loss = CastLossEstimate(self._model, self._dtype)
        loss = self._cast_loss.compare(self._weights_getter())
        if loss is not None and push.ranks.rank == 0:
            push.metrics["perf/weight_push_lost_share"] = loss.share
            self._cast_loss.warn_of(loss)

    def _plain(self) -> BucketSource:
        """Return the buckets that ``--check-weight-update-equal`` compares with."""
        if self._plain_source is None:
            own = self.buckets.source
            self._plain_source = own if isinstance(own, GatheredBuckets) else self.make_plain_source()
        return self._plain_source

    def _call_hook(self, folder: Path, engines: Sequence[Any]) -> None:
        """Call the user's hook, which may raise anything.

        Raises:
            HookError: it did.
        """
        path = self.args.custom_update_weight_post_write_path
        try:
            load_function(path)(self.args, str(folder), engines)
        except Exception as error:  # user's code
            raise HookError(f"--custom-update-weight-post-write-path {path} failed on {folder}: {error!r}") from error


def transport_name(args: Namespace) -> str:
    """Return the row of ``TRANSPORTS`` for the flags."""
    if args.update_weight_mode == "delta":
        return "delta"
    if args.update_weight_transport == "disk":
        return "disk"
    return "shared_memory" if args.colocate else "distributed"


def trainer_ranks(args: Namespace) -> TrainerRanks:
    """Return the place of this rank."""
    return TrainerRanks(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        stage=mpu.get_pipeline_model_parallel_rank(),
        num_stages=mpu.get_pipeline_model_parallel_world_size(),
        is_source=(
            mpu.get_data_parallel_rank(with_context_parallel=True) == 0 and mpu.get_tensor_model_parallel_rank() == 0
        ),
        ranks_per_host=args.actor_num_gpus_per_node,
    )


def disk_options(args: Namespace, hook: Callable[[Path, Sequence[Any]], None]) -> DiskOptions | None:
    """Return what the transports over disk need; None where pushes do not go over a disk."""
    if transport_name(args) not in ("disk", "delta"):
        return None
    return DiskOptions(
        root=Path(args.update_weight_disk_dir),
        model=Path(args.hf_checkpoint),
        has_copies=args.update_weight_local_checkpoint_dir is not None,
        keeps_files=args.update_weight_disk_keep_files,
        goes_on=bool(args.update_weight_start_version),
        encoding=args.update_weight_delta_encoding,
        checksum=args.update_weight_delta_checksum,
        on_written=hook if args.custom_update_weight_post_write_path is not None else None,
    )


def model_name(args: Namespace, hf_config: Mapping[str, Any]) -> str:
    """Return what chooses the name converter: ``--model-name``, or the model type of the HF config."""
    return args.model_name or hf_config["model_type"]
