"""The torch profiler over a window of rollouts (``--use-pytorch-profiler``), and memory snapshots.

``--profile-step-start/--profile-step-end`` count rollouts; ``--profile-target`` says what is profiled: the whole of
``train()`` (``train_overall``), the optimizer steps (``train_actor``) or the log-prob passes (``train_log_probs``).
"""

from __future__ import annotations

import logging
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from slime.flags.debug import profile_config

logger = logging.getLogger(__name__)


class TrainProfiler:
    """The profiler of one rank; idle unless its flags ask for something."""

    def __init__(self, args: Namespace, *, rank: int = 0) -> None:
        self._config = profile_config(args)
        self._rank = rank
        self._records_memory = self._config.record_memory_history and torch.cuda.is_available()
        if self._records_memory:
            torch.cuda.memory._record_memory_history(max_entries=1_000_000)

    @contextmanager
    def profile(self, target: str, rollout_id: int) -> Iterator[None]:
        """Profile the body when ``target`` is asked for and ``rollout_id`` is in the window, into a Chrome trace."""
        config = self._config
        is_in_window = config.profile_step_start <= rollout_id < config.profile_step_end
        if not (config.use_pytorch_profiler and target in config.profile_target and is_in_window):
            yield
            return
        with torch.profiler.profile(record_shapes=False) as profiler:
            yield
        folder = Path(config.tensorboard_dir or "profile")
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{target}_rollout{rollout_id}_rank{self._rank}.json.gz"
        profiler.export_chrome_trace(str(path))
        logger.info("profile of %s written to %s", target, path)

    def step(self, rollout_id: int) -> None:
        """Count a trained rollout; write the memory snapshot after ``--memory-snapshot-num-steps``."""
        if self._records_memory and rollout_id + 1 == self._config.memory_snapshot_num_steps:
            self.dump_memory(f"rollout{rollout_id}")

    def dump_memory(self, tag: str) -> Path | None:
        """Write the CUDA allocator's history (also useful after an out-of-memory error); None when it is not kept."""
        if not self._records_memory:
            return None
        folder = Path(self._config.memory_snapshot_dir)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"memory_{tag}_rank{self._rank}_{int(time.time())}.pickle"
        torch.cuda.memory._dump_snapshot(str(path))
        logger.info("memory snapshot written to %s", path)
        return path
