"""The order of a weight push, whatever carries the bytes.

    pause, flush -> begin -> buckets -> every engine acknowledges digests of what it holds -> commit -> continue

Nobody serves the new version before the commit, and only engines that hold exactly what was sent are asked to commit.
An engine that fails at any step is *fenced*: it stays paused, is named in the report, and the others go on.  Where its
failure broke a broadcast, the push is repeated without it under a new push id.

``update_weight_from_tensor`` and ``update_weight_from_distributed`` fill in how a bucket travels; ``roster`` keeps
who is fenced, ``bucket_source`` makes the buckets, ``acknowledgements`` compares digests.
"""

from __future__ import annotations

import logging
import uuid
from abc import ABC, abstractmethod
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slime.backends.megatron_utils import cpu_platform  # noqa: F401

# isort: split
from megatron.core import mpu

from slime.backends.megatron_utils import sglang
from slime.backends.megatron_utils.megatron_to_hf.quantization import checkpoint_quantizer
from slime.backends.megatron_utils.update_weight.engines.stock_engines import named_views
from slime.backends.megatron_utils.update_weight.protocol import push_steps
from slime.backends.megatron_utils.update_weight.protocol.acknowledgements import BucketDigests
from slime.backends.megatron_utils.update_weight.protocol.push import Push, PushReport
from slime.backends.megatron_utils.update_weight.protocol.roster import PUSH_FAILURES, PushClock, Roster, reason_of
from slime.backends.megatron_utils.update_weight.sources.bucket_source import NO_BUCKET, BucketSource, GatheredBuckets
from slime.backends.megatron_utils.update_weight.sources.gather import HostWeights
from slime.backends.megatron_utils.update_weight.sources.shard_buckets import ShardBuckets
from slime.utils.distributed_utils import get_gloo_group
from slime.utils.errors import WeightSyncError
from slime.weights.named_tensors import wire_dtype
from slime.weights.receiver import ExcludedEngine, WeightReceiver

logger = logging.getLogger(__name__)

MAX_BLAMELESS_ATTEMPTS = 2
"""How often a broadcast may break without an engine to blame; every other time one engine fewer remains."""


class WeightSender(ABC):
    """Pushes the weights of a model to engines.

    Invariant: all trainer ranks call the same methods in the same order; a failure on one rank is raised on all, so
    that none of them waits for another that is gone.  A version number is used for the same bytes only.

    Args:
        args: the run's arguments.
        model: this rank's chunks.
        weights_getter: host copies of the actor's parameters to send instead of the live ones; None sends these.
        model_name: ``--model-name`` or the model type of the HF config; it chooses the name converter.
        hf_config: the config of ``--hf-checkpoint``: the dtype and the quantisation of the engines' weights.
        first_version: versions count on from here, so that those of a resumed run stay above what its buffer holds.
    """

    def __init__(
        self,
        args: Namespace,
        model: Sequence[torch.nn.Module],
        weights_getter: Callable[[], HostWeights | None],
        *,
        model_name: str,
        hf_config: Mapping[str, Any],
        first_version: int = 0,
    ) -> None:
        self.args = args
        self.model = model
        self.weights_getter = weights_getter
        self.model_name = model_name
        self.quantization_config = hf_config.get("quantization_config")
        self.dtype = wire_dtype(hf_config)
        self.timeout_s = float(args.weight_update_timeout_s)
        self.weight_version = first_version
        self.receivers: list[WeightReceiver] = []
        self.fenced: tuple[ExcludedEngine, ...] = ()
        """Whom the last push left out, also when it raised."""
        self._source: BucketSource | None = None
        self._plain_source: BucketSource | None = None
        self._digests: BucketDigests | None = None
        self._have_weights_changed = False
        self._is_repacking_known = False
        self._sends_shards = False
        self._name = ""
        self._num_attempts = 0

    # How a bucket travels

    across_stages: bool = True
    """Every rank needs the parameters of all pipeline stages; otherwise the stages send their own, in turn."""

    @abstractmethod
    def connect(self, receivers: Sequence[WeightReceiver]) -> None:
        """Find out who talks to which of these engines; asks no engine anything."""

    @abstractmethod
    def form_groups(self, push: Push) -> None:
        """Collective: make the paths to the engines that are still in the push.

        Engines that do not come are fenced; ``must_repeat`` then asks for another try without them.
        """

    @abstractmethod
    def offer(self, push: Push, index: int, flat: Tensor) -> None:
        """Collective: bring a bucket on its way and wait until it is delivered; fences engines that do not take it."""

    @abstractmethod
    def speaks_to(self, receiver: WeightReceiver) -> bool:
        """Whether this rank is the one that hands buckets (of its turn) to the engine."""

    # What is sent

    @property
    def sends_shards(self) -> bool:
        """Whether all connected engines can take parts of tensors the way that this sender has; same on all ranks."""
        return False

    def make_source(self) -> BucketSource:
        """Where the buckets come from; collective."""
        return ShardBuckets(**self._source_options()) if self._sends_shards else self.make_plain_source()

    def make_plain_source(self) -> GatheredBuckets:
        """Whole tensors, gathered: right for every model, layout and engine; collective."""
        return GatheredBuckets(**self._source_options(), across_stages=self.across_stages)

    def _source_options(self) -> dict[str, Any]:
        return {
            "args": self.args,
            "model": self.model,
            "weights_getter": self.weights_getter,
            "model_name": self.model_name,
            "dtype": self.dtype,
            "quantizer": checkpoint_quantizer(self.args.hf_checkpoint, self.quantization_config, dtype=self.dtype),
            "bucket_bytes": self.args.update_weight_buffer_size,
        }

    @property
    def source(self) -> BucketSource:
        """The buckets of this model; made at the first push, collectively."""
        if self._source is None:
            self._source = self.make_source()
            self._digests = BucketDigests(self._source.manifest)
            if isinstance(self._source, ShardBuckets):
                self._source.note_digests = self._digests.note
        return self._source

    # The verbs

    def connect_rollout_engines(self, receivers: Sequence[WeightReceiver]) -> None:
        """Take ``receivers`` as the engines to push to from now on."""
        self.receivers = list(receivers)
        unverified = [receiver.index for receiver in self.receivers if not receiver.acknowledges]
        if unverified and dist.get_rank() == 0:
            logger.warning(
                "engines %s run without our loader: pushes to them are not verified, and one that breaks a broadcast "
                "takes the others with it; start them with --custom-weight-loader %s",
                unverified, sglang.RECEIVER,
            )  # fmt: skip
        self._is_repacking_known = False
        self.connect(self.receivers)
        if self.sends_shards != self._sends_shards:
            self._source, self._sends_shards = None, self.sends_shards

    def extra_metrics(self) -> dict[str, float]:
        """Metrics of the last push beside those of its report."""
        return {}

    def note_weights_changed(self) -> None:
        """The model was trained since the last push; call on all ranks."""
        self._have_weights_changed = True

    def update_weights(self) -> PushReport:
        """Push the present weights to all engines, as the next version.

        Raises:
            WeightSyncError: no engine took them (``fenced`` says why), or the trainer itself failed, or (with
                ``--check-weight-update-equal``) an engine holds other values, or weights that nobody sent.
        """
        self.weight_version += 1
        return self._push()

    def resend_weights(self) -> PushReport:
        """Push to engines that missed the last push; the others are not connected meanwhile.

        Under the last push's version, unless the model was trained since: then these are new bytes.
        """
        if self._have_weights_changed:
            self.weight_version += 1
        return self._push()

    # The order of a push

    def _push(self) -> PushReport:
        self._have_weights_changed = False
        push = Push(str(self.weight_version), Roster(self.receivers), PushClock(self.timeout_s))
        self.fenced = ()
        try:
            self._run(push)
        finally:
            self.fenced = push.roster.fenced
        manifest = self.source.manifest
        size = sum(bucket.num_bytes for bucket in manifest.buckets)
        report = PushReport(
            self.weight_version, len(manifest.tensors), len(manifest.buckets), size, push.clock.elapsed_s,
            num_engines=len(push.roster.good), num_attempts=push.num_attempts, fenced=push.roster.fenced,
            seconds=push.seconds,
        )  # fmt: skip
        if dist.get_rank() == 0:
            logger.info(
                "Pushed weight version %s to %d engines: %d tensors, %.1f MiB in %d buckets, %.2f s.%s",
                push.version, report.num_engines, report.num_tensors, size / 2**20, report.num_buckets,
                report.elapsed_s,
                " Every engine's weights equal the trainer's." if self.args.check_weight_update_equal else "",
            )  # fmt: skip
        return report

    def _run(self, push: Push) -> None:
        repacks = self._repacks_quantized_weights
        if repacks and not self._is_repacking_known:
            self.on_main_rank(push, "asking for a push's needs", lambda: push_steps.require_repacking(push))
            self._is_repacking_known = True
        with push.step("pause"):
            self.on_main_rank(push, "pausing the engines", lambda: push_steps.pause(push, repacks=repacks))
        if self.args.check_weight_update_equal:
            # A comparison of what was sent cannot see what was forgotten: that still holds the poison afterwards.
            self.on_main_rank(
                push, "poisoning the engines' weights", lambda: push_steps.run_check(push, sglang.POISON_LOADER)
            )
        with push.step("publish"):
            self._publish(push)
        with push.step("acknowledge"):
            self.on_main_rank(push, "comparing digests", lambda: push_steps.acknowledge(push, self.source.manifest))
        if self.args.check_weight_update_equal:
            self._compare(push)
            self.on_main_rank(
                push,
                "looking for weights that were not sent",
                lambda: push_steps.run_check(push, sglang.FIND_POISON_LOADER),
            )
        with push.step("commit"):
            self.on_main_rank(
                push, f"committing version {push.version}", lambda: push_steps.commit(push, repacks=repacks)
            )
        with push.step("continue"):
            self.on_main_rank(
                push, f"letting the engines continue with version {push.version}", lambda: push_steps.resume(push)
            )

    @property
    def _repacks_quantized_weights(self) -> bool:
        return (self.quantization_config or {}).get("quant_method") == "compressed-tensors"

    def _publish(self, push: Push) -> None:
        """Send all buckets, again and again while engines break the broadcast of others."""
        source = self.source
        while True:
            push.num_attempts += 1
            push.id = self._next_push_id(push.version)
            push.must_repeat = False
            push.digests = {}
            with push.step("begin"):
                self.on_main_rank(push, "beginning the push", lambda: push_steps.begin(push, source.manifest))
            self.form_groups(push)
            while push.must_repeat:
                push.must_repeat = False
                self.form_groups(push)
            self._send(push, source)
            if not push.must_repeat:
                return
            if push.num_attempts > len(self.receivers) + MAX_BLAMELESS_ATTEMPTS:
                raise WeightSyncError(
                    f"weight version {push.version} was sent {push.num_attempts} times, and each time a broadcast "
                    "broke; look at the network between the trainer and the engines"
                )
            logger.warning("push %s is repeated without the engines that broke it", push.id)

    def _next_push_id(self, version: str) -> str:
        if not self._name:
            names = [uuid.uuid4().hex[:8]]
            dist.broadcast_object_list(names, src=0, group=get_gloo_group())
            self._name = names[0]
        self._num_attempts += 1
        return f"{self._name}-{self._num_attempts}-v{version}"

    @torch.no_grad()
    def _send(self, push: Push, source: BucketSource) -> None:
        """Walk all buckets of this rank, in turns with those of other pipeline stages."""
        digests = self._digests
        assert digests is not None

        def send() -> None:
            for index, flat in source.iter_buckets():
                if index != NO_BUCKET:
                    digests.take(index, flat)
                with push.step("hand over"):
                    self.offer(push, index, flat)
            push.digests = digests.finish()

        self._in_turns(push, f"sending the tensors of version {push.version}", send)

    def _in_turns(self, push: Push, what: str, work: Callable[[], None]) -> None:
        """Let the ranks of each pipeline stage work, stage after stage, or all of them at once.

        Two stages in flight would reach two engines in different orders, and both would wait for ever.
        """
        num_turns = 1 if self.across_stages else mpu.get_pipeline_model_parallel_world_size()
        for turn in range(num_turns):
            is_turn = num_turns == 1 or turn == mpu.get_pipeline_model_parallel_rank()
            if is_turn and not push.must_repeat:
                work()
            self.meet(push, what)

    # --check-weight-update-equal

    def _compare(self, push: Push) -> None:
        """Every engine compares whole tensors, gathered independently of how they were sent, with what it holds."""
        if self._plain_source is None:
            is_plain = isinstance(self.source, GatheredBuckets)
            self._plain_source = self.source if is_plain else self.make_plain_source()
        source = self._plain_source

        def compare() -> None:
            for index, flat in source.iter_buckets():
                engines = [engine for engine in push.roster.good if self.speaks_to(engine)]
                if index == NO_BUCKET or not engines or push.failures:
                    continue
                text = sglang.serialize_by_value(named_views(flat, source.manifest.buckets[index], source.manifest))
                try:
                    push_steps.run_check(push, sglang.COMPARE_LOADER, text, engines)
                except PUSH_FAILURES as error:
                    push.failures.append(error)  # go on through the buckets: the other ranks gather with this one

        self._in_turns(push, f"comparing the tensors of version {push.version}", compare)

    # All ranks together

    def on_main_rank(self, push: Push, what: str, action: Callable[[], None]) -> None:
        """Run ``action`` on rank 0 while the others wait for its end."""
        self.run_together(push, what, action if dist.get_rank() == 0 else None)

    def run_together(self, push: Push, what: str, action: Callable[[], None] | None) -> None:
        """Run this rank's ``action``, if it has one, and wait for those of all ranks."""
        if action is not None:
            try:
                action()
            except PUSH_FAILURES as error:
                push.failures.append(error)
        self.meet(push, what)

    def meet(self, push: Push, what: str) -> None:
        """Meet all ranks: all know then who is fenced, whether to repeat, and the digests of what was sent.

        Raises:
            WeightSyncError: a rank failed (the first failure of any is raised on all), no engine is left, or two
                ranks sent different bytes as the same bucket.
        """
        text = reason_of(push.failures[0]) if push.failures else None
        group = get_gloo_group()
        told: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(told, (text, push.roster.reasons, push.must_repeat, push.digests), group=group)
        for rank, (reported, *_) in enumerate(told):
            if reported is not None:
                raise WeightSyncError(f"trainer rank {rank} failed while {what}. {reported}") from next(
                    iter(push.failures), None
                )
        push.roster.merge([reasons for _, reasons, _, _ in told])
        push.must_repeat = any(must_repeat for _, _, must_repeat, _ in told)
        push.digests = _one_digest_each([digests for *_, digests in told])
        if self.receivers and not push.roster.good:
            listed = "; ".join(f"engine {fenced.index}: {fenced.reason}" for fenced in push.roster.fenced)
            raise WeightSyncError(f"no engine took weight version {push.version} ({what}). {listed}")


def _one_digest_each(digests_of_ranks: Sequence[Mapping[int, int]]) -> dict[int, int]:
    merged: dict[int, int] = {}
    for rank, digests in enumerate(digests_of_ranks):
        for index, digest in digests.items():
            if merged.setdefault(index, digest) != digest:
                raise WeightSyncError(
                    f"trainer rank {rank} sent other bytes as bucket {index} than the ranks before it: their copies "
                    "of some parameter have drifted apart"
                )
    return merged
