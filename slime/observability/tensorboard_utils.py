"""TensorBoard as a metrics sink; the only module that imports it."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Mapping
from numbers import Number
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from slime.flags.observability import TrackingConfig, tracking_config
from slime.observability.telemetry import Sink
from slime.utils import env


def tensorboard_folder(config: TrackingConfig) -> str:
    """Return ``TENSORBOARD_DIR``, or ``tensorboard_log/{--tb-project-name}/{--tb-experiment-name or run id}``."""
    project = config.tb_project_name or "slime"
    experiment = config.tb_experiment_name or config.wandb_run_id or time.strftime("%Y%m%d-%H%M%S")
    return env.get_str("TENSORBOARD_DIR") or f"tensorboard_log/{project}/{experiment}"


class _TensorboardAdapter(Sink):
    """A writer of each number of a record as a scalar.  Plug-ins call ``log(data=..., step=...)``."""

    def __init__(self, args: Namespace) -> None:
        self._writer = SummaryWriter(tensorboard_folder(tracking_config(args)), flush_secs=10)

    def log(
        self,
        metrics: Mapping[str, Any] | None = None,
        step_key: str | None = None,
        *,
        data: Mapping[str, Any] | None = None,
        step: int | None = None,
    ) -> None:
        """Write one record, ``(metrics, step_key)`` or ``data=, step=``; the step key itself is not a scalar."""
        values = metrics if metrics is not None else data or {}
        at = step if step is not None else values[step_key] if step_key else None
        for name, value in values.items():
            if hasattr(value, "item"):
                value = value.item()
            if name != step_key and isinstance(value, Number) and not isinstance(value, complex):
                self._writer.add_scalar(name, float(value), at)  # type: ignore[arg-type]

    def close(self) -> None:
        self._writer.close()
