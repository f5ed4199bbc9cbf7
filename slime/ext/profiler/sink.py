"""The torch profiler over a window of rollouts (``--use-pytorch-profiler``), and memory snapshots.

``--profile-step-start/--profile-step-end`` count rollouts; ``--profile-target`` says what is profiled: the whole of
``train()`` (``train_overall``), the optimizer steps (``train_actor``) or the log-prob passes (``train_log_probs``).
"""

from __future__ import annotations

import logging
import time
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from slime.ext.profiler.flags import ProfileConfig
from slime.observability.telemetry import Sink

logger = logging.getLogger(__name__)


TARGETS = {
    "train": "train_overall",
    "actor_train": "train_actor",
    "log_probs": "train_log_probs",
    "ref_log_probs": "train_log_probs",
    "teacher_log_probs": "train_log_probs",
    "values": "train_log_probs",
}
"""Span of a rank -> ``--profile-target``."""


class TrainProfiler(Sink):
    """The profiler of one rank of a trainer; idle in other processes."""

    def __init__(self, args: Namespace, process: str, *, primary: bool) -> None:
        self._config = ProfileConfig.of(args)
        self._rank = process.split()[-1]
        self._is_rank = self._rank.isdigit()
        self._running: tuple[str, torch.profiler.profile] | None = None
        self._records_memory = self._is_rank and self._config.record_memory_history and torch.cuda.is_available()
        if self._records_memory:
            torch.cuda.memory._record_memory_history(max_entries=1_000_000)

    def begin(self, name: str, fields: Mapping[str, Any]) -> None:
        config = self._config
        is_asked = self._is_rank and config.use_pytorch_profiler and TARGETS.get(name) in config.profile_target
        is_in_window = config.profile_step_start <= fields.get("rollout", -1) < config.profile_step_end
        if is_asked and is_in_window and self._running is None:
            self._running = name, torch.profiler.profile(record_shapes=False)
            self._running[1].start()

    def span(self, name: str, began: float, ended: float, fields: Mapping[str, Any]) -> None:
        if self._running is not None and self._running[0] == name:
            (_, profiler), self._running = self._running, None
            profiler.stop()
            folder = Path(self._config.tensorboard_dir or "profile")
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"{TARGETS[name]}_rollout{fields['rollout']}_rank{self._rank}.json.gz"
            profiler.export_chrome_trace(str(path))
            logger.info("Profile of %s written to %s", TARGETS[name], path)
        num_steps = self._config.memory_snapshot_num_steps
        if self._records_memory and name == "train" and fields["rollout"] + 1 == num_steps:
            self._dump_memory(f"rollout{fields['rollout']}")

    def _dump_memory(self, tag: str) -> None:
        folder = Path(self._config.memory_snapshot_dir)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"memory_{tag}_rank{self._rank}_{int(time.time())}.pickle"
        torch.cuda.memory._dump_snapshot(str(path))
        logger.info("Memory snapshot written to %s", path)
