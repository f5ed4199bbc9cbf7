"""The weight pushes of one trainer rank: versions, the form in which engines load weights, and the transport."""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import mpu

from slime.backends.megatron_utils import memory
from slime.backends.megatron_utils.megatron_to_hf import checkpoint_quantizer, hf_form
from slime.backends.megatron_utils.parameters import constant_parameters
from slime.backends.megatron_utils.update_weight.cast_loss import CastLossEstimate
from slime.backends.megatron_utils.update_weight.gather import HostWeights
from slime.backends.megatron_utils.update_weight.plain_push import PlainPush
from slime.backends.megatron_utils.update_weight.transport import MakeTransport, SentWeights, Transport
from slime.utils.errors import WeightSyncError
from slime.weights.named_tensors import pushed_dtype
from slime.weights.push.engine import EngineProxy
from slime.weights.push.participants import ExcludedEngine, Participants, PushClock
from slime.weights.push.state import Push, PushReport, TrainerRanks


class WeightUpdater:
    """Pushes the weights of a model to engines.

    Invariant: all trainer ranks call the same methods in the same order.  One version number never stands for
    different bytes.

    Args:
        weights_getter: returns host copies to send, or None to send the model's live weights.
        hf_config: config.json of ``--hf-checkpoint``, which gives the quantization of the engines' weights.
        first_version: versions continue from here, so that a resumed run stays above the versions in its buffer.
        make_transport: builds the transport; None for the plain push.
    """

    def __init__(
        self,
        args: Namespace,
        model: Sequence[torch.nn.Module],
        weights_getter: Callable[[], HostWeights | None],
        *,
        hf_config: Mapping[str, Any],
        first_version: int = 0,
        make_transport: MakeTransport | None = None,
    ) -> None:
        self.args, self.version = args, first_version
        self._ranks = trainer_ranks(args.actor_num_gpus_per_node)
        self.engines: list[EngineProxy] = []
        self.excluded: list[ExcludedEngine] = []
        """The engines that the last push excluded, even if it raised."""
        self.report: PushReport | None = None
        """Report of the last successful push."""
        self._model, self._weights_getter, self._hf_config = model, weights_getter, hf_config
        self._make_transport: MakeTransport = make_transport or (lambda args, ranks: PlainPush(ranks))
        self._transport: Transport | None = None
        self._weights: SentWeights | None = None
        self._cast_loss: CastLossEstimate | None = None
        self._have_weights_changed = True  # a previous process may have used first_version for other weights

    def connect(self, engines: Sequence[EngineProxy], num_new_engines: int) -> None:
        """Set the engines to push to; does nothing if ``num_new_engines`` is 0."""
        if num_new_engines == 0:
            return
        self.engines = list(engines)
        dtype = pushed_dtype([engine.dtype for engine in engines], self.args.params_dtype)
        if self._weights is None or self._weights.dtype != dtype:
            self._weights, self._cast_loss = self._weights_in(dtype), None
        self.transport.connect(engines, self._weights)
        memory.freeze_long_lived_objects()  # the first connection imports SGLang

    def record_weights_changed(self) -> None:
        """Record that the model was trained since the last push; call it on all ranks."""
        self._have_weights_changed = True

    def push(self) -> PushReport:
        """Push the current weights to all engines, as the next version.

        Raises:
            WeightSyncError: no engine is connected, or the push failed; see :meth:`Transport.send`.
        """
        self.version += 1
        return self._push()

    def resend(self) -> PushReport:
        """Push to engines that missed the last push, while only these are connected.

        The version is that of the last push.  If the model was trained since, or this process has not pushed yet, the
        bytes may differ, so the next version is used.

        Raises:
            WeightSyncError: as :meth:`push`.
        """
        if self._have_weights_changed:
            self.version += 1
        return self._push(is_resend=True)

    def write(self) -> Any:
        """Write the current weights as the next version, without contacting engines: the driver notifies them.

        Raises:
            WeightSyncError: the run does not push over a disk, or the disk or the hook failed.
        """
        self.version += 1
        push = self._new_push()
        self._estimate_cast_loss(push)
        return self.transport.write(push)

    def close(self) -> None:
        """Leave the groups with the engines; call it on every rank."""
        if self._transport is not None:
            self._transport.close()

    @property
    def transport(self) -> Transport:
        """The transport, built at the first connection; building it is collective."""
        if self._transport is None:
            self._transport = self._make_transport(self.args, self._ranks)
        return self._transport

    def _weights_in(self, dtype: torch.dtype) -> SentWeights:
        """Return the weights in the form for engines of this dtype; collective."""
        args = self.args
        return SentWeights(
            form=hf_form(args, args.model_name or self._hf_config["model_type"]),
            model=self._model,
            get_host_weights=self._weights_getter,
            dtype=dtype,
            quantizer=checkpoint_quantizer(args.hf_checkpoint, self._quantization, dtype=dtype),
            bucket_bytes=args.update_weight_buffer_size,
            constants=frozenset().union(*self._ranks.gather(constant_parameters(self._model))),
        )

    @property
    def _quantization(self) -> dict[str, Any] | None:
        return self._hf_config.get("quantization_config")

    def _new_push(self, *, is_resend: bool = False) -> Push:
        clock = PushClock(float(self.args.weight_update_timeout_s))
        is_notable = self.report is None or is_resend or self.args.check_weight_update_equal
        return Push(
            str(self.version),
            Participants(self.engines, clock),
            self._ranks,
            repacks=(self._quantization or {}).get("quant_method") == "compressed-tensors",
            checks=self.args.check_weight_update_equal,
            is_resend=is_resend,
            log_level=logging.INFO if is_notable else logging.DEBUG,
        )

    def _push(self, *, is_resend: bool = False) -> PushReport:
        if self._weights is None:
            raise WeightSyncError("no engine is connected to this trainer; call connect_rollout_engines first")
        self._have_weights_changed, self.excluded = False, []
        push = self._new_push(is_resend=is_resend)
        try:
            self._estimate_cast_loss(push)
            self.report = self.transport.send(push)
            return self.report
        finally:
            self.excluded = list(push.participants.excluded)

    def _estimate_cast_loss(self, push: Push) -> None:
        """Estimate what this rank's weights lose in the cast, and warn on rank 0."""
        assert self._weights is not None
        if not self.transport.sends_model:
            return
        if self._cast_loss is None:
            self._cast_loss = CastLossEstimate(self._model, self._weights.dtype)
        loss = self._cast_loss.compare(self._weights_getter())
        if loss is not None and push.ranks.rank == 0:
            push.metrics["perf/weight_push_lost_share"] = loss.share
            self._cast_loss.warn_of(loss)


def trainer_ranks(ranks_per_host: int) -> TrainerRanks:
    """Return this rank's place among the trainer's ranks."""
    return TrainerRanks(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        stage=mpu.get_pipeline_model_parallel_rank(),
        num_stages=mpu.get_pipeline_model_parallel_world_size(),
        is_source=(
            mpu.get_data_parallel_rank(with_context_parallel=True) == 0 and mpu.get_tensor_model_parallel_rank() == 0
        ),
        ranks_per_host=ranks_per_host,
    )
