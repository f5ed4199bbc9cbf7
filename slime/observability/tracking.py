"""What a metrics sink must offer, and which sinks a run's flags ask for."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import Any, Protocol

from slime.flags.observability import tracking_config
from slime.observability.metrics_file import MetricsFile, metrics_path


class Tracker(Protocol):
    """Somewhere to send metrics.  A tracker never changes what it is given."""

    def log(self, metrics: Mapping[str, Any], step_key: str) -> None:
        """Take one record; ``metrics[step_key]`` is its place on the axis."""

    def finish(self) -> None:
        """Flush and close; no ``log`` follows."""


def make_trackers(args: Namespace, *, primary: bool) -> list[Tracker]:
    """The sinks that the flags ask for, in this process.  Their packages are imported only when asked for."""
    trackers: list[Tracker] = []
    path = metrics_path(args)
    if path is not None:
        trackers.append(MetricsFile(path))
    config = tracking_config(args)
    if config.use_wandb and config.wandb_mode != "disabled":
        from slime.observability.wandb_utils import WandbTracker

        trackers.append(WandbTracker(args, primary=primary))
    if config.use_tensorboard:
        from slime.observability.tensorboard_utils import _TensorboardAdapter

        trackers.append(_TensorboardAdapter(args))
    return trackers
