"""The pushes of one trainer rank: when a sender is made, what it is told, what is said of each push."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from slime.backends.megatron_utils import memory
from slime.backends.megatron_utils.update_weight import sender_class
from slime.backends.megatron_utils.update_weight.protocol.disk_steps import WrittenVersion
from slime.backends.megatron_utils.update_weight.sender import WeightSender
from slime.backends.megatron_utils.update_weight.sources.gather import HostWeights
from slime.backends.megatron_utils.update_weight.update_weight_from_disk import UpdateWeightFromDisk
from slime.utils.errors import WeightSyncError
from slime.weights.receiver import ExcludedEngine, WeightReceiver


class WeightPushes:
    """The sender that the flags ask for, from the first engine on.

    Invariant: as for a sender, all ranks call the same methods in the same order.

    Args:
        args: the run's arguments.
        model: this rank's chunks.
        weights_getter: host copies to send instead of the model's own weights; None sends these.
        hf_config: of ``--hf-checkpoint``.
        start_rollout_id: versions count on from here, or from ``--update-weight-start-version`` where that is more.
    """

    def __init__(
        self,
        args: Namespace,
        model: Sequence[torch.nn.Module],
        weights_getter: Callable[[], HostWeights | None],
        *,
        hf_config: Mapping[str, Any],
        start_rollout_id: int,
    ) -> None:
        self._args, self._model, self._weights_getter = args, model, weights_getter
        self._hf_config, self._start_rollout_id = hf_config, start_rollout_id
        self.sender: WeightSender | None = None

    def connect(self, receivers: Sequence[WeightReceiver], num_new_engines: int) -> None:
        """Connect to these engines; nothing happens when none of them is new."""
        if self.sender is None:
            self.sender = sender_class(self._args)(
                self._args,
                self._model,
                self._weights_getter,
                model_name=model_name(self._args, self._hf_config),
                hf_config=self._hf_config,
                first_version=max(self._start_rollout_id, self._args.update_weight_start_version),
            )
        if num_new_engines > 0:
            self.sender.connect_rollout_engines(receivers)
            memory.freeze_long_lived_objects()  # the first connection imports SGLang

    def note_weights_changed(self) -> None:
        """The model was trained; where no engine is connected yet, nobody need know."""
        if self.sender is not None:
            self.sender.note_weights_changed()

    def push(self) -> dict[str, float]:
        """Push the present weights as the next version; gives ``perf/weight_push_*``.

        Raises:
            WeightSyncError: no engine is connected, or the push failed.
        """
        sender = self._connected()
        report = sender.update_weights()
        return {
            "perf/weight_push_s": report.elapsed_s,
            "perf/weight_push_bytes": float(report.num_bytes),
            "perf/weight_push_excluded": float(len(report.fenced)),
            **sender.extra_metrics(),
        }

    def resend(self) -> None:
        """Push what the last push sent, under the same version, to the engines connected now.

        Raises:
            WeightSyncError: as :meth:`push`.
        """
        self._connected().resend_weights()

    def write(self) -> WrittenVersion:
        """Write the weights to disk, and ask no engine.

        Raises:
            WeightSyncError: this run's pushes do not go over a disk, or the disk refuses.
        """
        if not isinstance(self.sender, UpdateWeightFromDisk):
            raise WeightSyncError("no sender writes to disk here; use --update-weight-transport disk")
        return self.sender.write_weights()

    @property
    def fenced(self) -> list[ExcludedEngine]:
        """The engines that the last push left out."""
        return list(self.sender.fenced) if self.sender is not None else []

    def _connected(self) -> WeightSender:
        if self.sender is None:
            raise WeightSyncError("no engine is connected to this trainer; call connect_rollout_engines first")
        return self.sender


def model_name(args: Namespace, hf_config: Mapping[str, Any]) -> str:
    """What chooses the name converter: ``--model-name``, or the model type of the HF config."""
    return args.model_name or hf_config["model_type"]
