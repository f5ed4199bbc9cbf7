"""Functions with which plug-ins written for slime open a process's sinks and log metrics."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from slime.observability import telemetry
from slime.observability.text_log import configure_logger

__all__ = ["configure_logger", "finish_tracking", "init_tracking", "log"]


def init_tracking(args: Namespace, primary: bool = True) -> dict[str, Any]:
    """Open the sinks that the flags select in this process, unless they are open.

    Args:
        primary: True in the driver.

    Returns:
        ``slime.observability.telemetry.values_of_the_run``.
    """
    if telemetry.is_open():
        return telemetry.values_of_the_run()
    from slime.compose import SINKS, chosen
    from slime.ray.parts import load_all

    return telemetry.start(args, "driver" if primary else "plug-in", load_all(chosen(args, SINKS)), primary=primary)


def log(args: Namespace, metrics: Mapping[str, Any], step_key: str) -> None:
    """Send one record to every sink of the run; see ``slime.observability.telemetry.log``."""
    init_tracking(args, primary=False)
    telemetry.log(metrics, step_key)


def finish_tracking(args: Namespace | None = None) -> None:
    """Flush and close this process's sinks; safe to call twice or without open sinks."""
    telemetry.stop()
