"""Weights & Biases as a metrics sink; the only module that imports wandb.

One run, several writers: the driver is the primary writer, the others join by the run id.  With
``--wandb-mode offline`` nothing leaves the machine: each writer keeps a folder of its own under ``--wandb-dir``, all
with the same run id, and ``wandb sync --append`` puts them together later.
"""

from __future__ import annotations

import os
import sys
import uuid
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import wandb

from slime.flags.observability import tracking_config
from slime.observability.telemetry import Sink
from slime.utils.redaction import redacted, redacted_words

AXES = {
    "train/step": ("train/*",),
    "rollout/step": ("rollout/*", "multi_turn/*", "multi_turn_metric/*", "passrate/*", "perf/*"),
    "eval/step": ("eval/*",),
}


@contextmanager
def _redacted_command_line() -> Iterator[None]:
    """Hide secrets from wandb, which writes the command line down."""
    words = sys.argv
    sys.argv = redacted_words(words)
    try:
        yield
    finally:
        sys.argv = words


class WandbTracker(Sink):
    """One writer of the run.  Config is written by the primary only."""

    def __init__(self, args: Namespace, *, primary: bool) -> None:
        config = tracking_config(args)
        is_offline = config.wandb_mode == "offline"
        if not is_offline and config.wandb_key:
            wandb.login(key=config.wandb_key, host=config.wandb_host)
        group = config.wandb_group
        if group and config.wandb_random_suffix:  # it keeps runs of one group apart
            group = f"{group}_{config.wandb_run_id or uuid.uuid4().hex[:6]}"
        if config.wandb_dir:
            os.makedirs(config.wandb_dir, exist_ok=True)
        settings: dict[str, Any] = {"console": "off", "silent": True}
        if is_offline:
            settings["mode"] = "offline"
        else:
            settings.update(mode="shared", x_primary=primary, x_update_finish_state=primary)
        shown = vars(redacted(args))
        flags = {name: dict(vars(value)) if isinstance(value, Namespace) else value for name, value in shown.items()}
        with _redacted_command_line():
            self._run = wandb.init(
                id=config.wandb_run_id,
                entity=config.wandb_team,
                project=config.wandb_project,
                group=group,
                name=f"{group or 'slime'}-RANK_0",
                dir=config.wandb_dir,
                config=flags if primary else None,
                settings=wandb.Settings(**settings),
            )
        for axis, patterns in AXES.items():
            wandb.define_metric(axis)
            for pattern in patterns:
                wandb.define_metric(pattern, step_metric=axis)

    def log(self, metrics: Mapping[str, Any], step_key: str) -> None:
        """Send one record; the axes are defined by metric name, so ``step_key`` travels as a metric."""
        self._run.log(dict(metrics))

    def close(self) -> None:
        self._run.finish()
