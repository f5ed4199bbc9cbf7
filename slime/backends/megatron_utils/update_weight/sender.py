"""The order of a weight push, whatever carries the bytes.

    pause engines -> flush caches -> send buckets -> every engine reports the new version -> continue

``update_weight_from_tensor`` and ``update_weight_from_distributed`` fill in how a bucket travels.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from slime.backends.megatron_utils import cpu_platform  # noqa: F401

# isort: split
from megatron.core import mpu

from slime.backends.megatron_utils import sglang
from slime.backends.megatron_utils.update_weight.gather import HostWeights, iter_hf_buckets
from slime.utils.distributed_utils import get_gloo_group
from slime.utils.errors import SlimeError, WeightSyncError
from slime.weights.named_tensors import NamedTensors, total_bytes, wire_dtype
from slime.weights.receiver import Pending, WeightReceiver

logger = logging.getLogger(__name__)

PUSH_FAILURES = (SlimeError, RuntimeError, OSError, TimeoutError)
"""What an engine's refusal, its death or a lost connection looks like on the rank that meets it."""


@dataclass(frozen=True, slots=True)
class PushReport:
    """What one push moved."""

    version: int
    num_tensors: int
    num_buckets: int
    num_bytes: int
    elapsed_s: float


def wait_all(pending: Sequence[Pending], timeout_s: float) -> list[Any]:
    """The answers of all requests, which share one deadline."""
    deadline = perf_counter() + timeout_s
    return [request.wait(max(deadline - perf_counter(), 0.001)) for request in pending]


class WeightSender(ABC):
    """Pushes the weights of a model to engines.

    Invariant: all trainer ranks call the same methods in the same order; a failure on one rank is raised on all, so
    that none of them waits for another that is gone.

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

    # How a bucket travels

    across_stages: bool = True
    """Every rank needs the parameters of all pipeline stages; otherwise the stages send their own, in turn."""

    @abstractmethod
    def connect(self, receivers: Sequence[WeightReceiver]) -> None:
        """Make the paths to these engines; all earlier ones are gone or in the list."""

    @abstractmethod
    def offer(self, bucket: NamedTensors, version: str, *, compare: bool) -> Callable[[], None] | None:
        """Do the collective part of a bucket's journey and return what is left for this rank alone, if anything.

        Args:
            bucket: the same on all ranks (of the pipeline stage).
            version: what the engines call these weights.
            compare: the engines compare the tensors with what they hold, and load nothing.
        """

    def settle(self) -> None:  # noqa: B027  nothing to wait for by default
        """Collective: wait until the bucket offered last is delivered, and let go of it."""

    # The order of a push

    def connect_rollout_engines(self, receivers: Sequence[WeightReceiver]) -> None:
        """Take ``receivers`` as the engines to push to from now on."""
        self.receivers = list(receivers)
        self.connect(self.receivers)

    def update_weights(self) -> PushReport:
        """Push the present weights to all engines.

        Raises:
            WeightSyncError: an engine refused a bucket, holds another version after the push, or (with
                ``--check-weight-update-equal``) other values, or weights that nobody sent.
        """
        started = perf_counter()
        self.weight_version += 1
        version = str(self.weight_version)
        self.on_main_rank(f"pausing the engines for version {version}", self._pause_engines)
        if self.args.check_weight_update_equal:
            # A comparison of what was sent cannot see what was forgotten: that still holds the poison afterwards.
            self.on_main_rank("poisoning the engines' weights", lambda: self._ask_all(sglang.POISON_LOADER, version))
        tensors, buckets, size = self._send(version, compare=False)
        self.on_main_rank(f"checking that the engines hold version {version}", lambda: self._check_versions(version))
        if self.args.check_weight_update_equal:
            self._send(version, compare=True)
            self.on_main_rank(
                "looking for weights that were not sent", lambda: self._ask_all(sglang.FIND_POISON_LOADER, version)
            )
        self.on_main_rank(f"letting the engines continue with version {version}", self._continue_engines)
        report = PushReport(self.weight_version, tensors, buckets, size, perf_counter() - started)
        if dist.get_rank() == 0:
            logger.info(
                "Pushed weight version %s to %d engines: %d tensors, %.1f MiB in %d buckets, %.2f s.%s",
                version, len(self.receivers), tensors, size / 2**20, buckets, report.elapsed_s,
                " Every engine's weights equal the trainer's." if self.args.check_weight_update_equal else "",
            )  # fmt: skip
        return report

    def resend_weights(self) -> PushReport:
        """Push to engines that missed the last push, under its version; the others are not connected meanwhile."""
        self.weight_version -= 1
        return self.update_weights()

    @torch.no_grad()
    def _send(self, version: str, *, compare: bool) -> tuple[int, int, int]:
        """Walk all buckets; returns the tensors, buckets and bytes that passed through this rank."""
        tensors = buckets = size = 0
        failure: Exception | None = None
        stages = 1 if self.across_stages else mpu.get_pipeline_model_parallel_world_size()
        for stage in range(stages):
            if stages == 1 or stage == mpu.get_pipeline_model_parallel_rank():
                for bucket in self._buckets():
                    delivery = self.offer(bucket, version, compare=compare)
                    if delivery is not None and failure is None:
                        try:
                            delivery()
                        except PUSH_FAILURES as error:
                            failure = error  # go on through the buckets: the other ranks gather with this one
                    self.settle()
                    tensors, buckets, size = tensors + len(bucket), buckets + 1, size + total_bytes(bucket)
            if stages > 1:
                # Two stages in flight would reach two engines in different orders, and both would wait for ever.
                dist.barrier(group=get_gloo_group())
        self.together(f"{'comparing' if compare else 'sending'} the tensors of version {version}", failure)
        return tensors, buckets, size

    def _buckets(self) -> Iterator[NamedTensors]:
        return iter_hf_buckets(
            self.args,
            self.model,
            bucket_bytes=self.args.update_weight_buffer_size,
            model_name=self.model_name,
            dtype=self.dtype,
            quantization_config=self.quantization_config,
            host_weights=self.weights_getter(),
            across_stages=self.across_stages,
        )

    # Rank 0 speaks for the group

    @property
    def _repacks_quantized_weights(self) -> bool:
        return (self.quantization_config or {}).get("quant_method") == "compressed-tensors"

    def _pause_engines(self) -> None:
        wait_all([receiver.pause_generation() for receiver in self.receivers], self.timeout_s)
        wait_all([receiver.flush_cache() for receiver in self.receivers], self.timeout_s)
        if self._repacks_quantized_weights:
            self._post_process(restore_weights_before_load=True, post_process_quantization=False)

    def _continue_engines(self) -> None:
        if self._repacks_quantized_weights:
            self._post_process(restore_weights_before_load=False, post_process_quantization=True)
        wait_all([receiver.continue_generation() for receiver in self.receivers], self.timeout_s)

    def _post_process(self, **what: bool) -> None:
        wait_all([receiver.post_process_weights(**what) for receiver in self.receivers], self.timeout_s)

    def _ask_all(self, loader: str, version: str) -> None:
        """Let every engine run one of the weight checks that need no tensors."""
        nothing = sglang.serialize_by_value([])
        requests = [
            receiver.update_weights_from_tensor(
                serialized_named_tensors=[nothing] * receiver.num_gpus,
                load_format=loader,
                weight_version=version,
                flush_cache=False,
            )
            for receiver in self.receivers
        ]
        wait_all(requests, self.timeout_s)

    def _check_versions(self, version: str) -> None:
        held = wait_all([receiver.get_weight_version() for receiver in self.receivers], self.timeout_s)
        wrong = {r.index: v for r, v in zip(self.receivers, held, strict=True) if str(v) != version}
        if wrong:
            listed = ", ".join(f"engine {index} holds {v!r}" for index, v in wrong.items())
            raise WeightSyncError(
                f"after the push of weight version {version!r}, {listed}; all engines must hold the version pushed. "
                "Look for the first error in the logs of those engines"
            )

    def on_main_rank(self, what: str, action: Callable[[], None]) -> None:
        """Run ``action`` on rank 0 while the others wait for its end."""
        self.run_together(what, action if dist.get_rank() == 0 else None)

    def run_together(self, what: str, action: Callable[[], None] | None) -> None:
        """Run this rank's ``action``, if it has one, and wait for those of all ranks."""
        failure: Exception | None = None
        if action is not None:
            try:
                action()
            except PUSH_FAILURES as error:
                failure = error
        self.together(what, failure)

    def together(self, what: str, failure: Exception | None) -> None:
        """Meet all ranks; the first failure of any of them is raised on all.

        Raises:
            WeightSyncError: with the failing rank's message.
        """
        text = None if failure is None else f"{type(failure).__name__}: {failure}"
        group = get_gloo_group()
        failures: list[str | None] = [None] * dist.get_world_size(group)
        dist.all_gather_object(failures, text, group=group)
        for rank, reported in enumerate(failures):
            if reported is not None:
                raise WeightSyncError(f"trainer rank {rank} failed while {what}. {reported}") from failure
