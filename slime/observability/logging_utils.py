"""The log format, and the one door through which metrics leave a process.

The driver calls ``init_tracking(args)``; every other process that logs calls ``init_tracking(args, primary=False)``
(or nothing: the first ``log`` does it).  ``log`` hands a record to ``metrics.jsonl``, wandb and TensorBoard.
"""

from __future__ import annotations

import atexit
import logging
import sys
import time
import uuid
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime.observability.metrics_file import run_folder
from slime.observability.tracking import Tracker, make_trackers

logger = logging.getLogger(__name__)


class _Process:
    """What this process has set up, once."""

    is_logging_configured = False
    trackers: list[Tracker] | None = None


def configure_logger(prefix: str = "", level: int = logging.INFO) -> None:
    """Send INFO and above to stderr as ``[time prefix] file:line - message``.  Only the first call of a process acts."""
    if _Process.is_logging_configured:
        return
    _Process.is_logging_configured = True
    tag = f" {prefix}" if prefix else ""
    logging.basicConfig(
        level=level,
        format=f"[%(asctime)s{tag}] %(filename)s:%(lineno)d - %(message)s",
        datefmt="%Y-%m-%d %H:%M:%S",
        stream=sys.stderr,
        force=True,
    )
    for chatty in ("httpx", "httpcore", "urllib3", "filelock"):
        logging.getLogger(chatty).setLevel(logging.WARNING)


def _new_run_facts(args: Namespace) -> dict[str, Any]:
    """What must be the same in every process of the run, made up by the primary where no flag says it."""
    facts: dict[str, Any] = {}
    if run_folder(args) is None:
        facts["run_folder"] = str(Path("runs", time.strftime("%Y%m%d-%H%M%S")).absolute())
    if getattr(args, "use_wandb", False) and getattr(args, "wandb_run_id", None) is None:
        facts["wandb_run_id"] = uuid.uuid4().hex[:8]
    if getattr(args, "use_tensorboard", False) and getattr(args, "tb_experiment_name", None) is None:
        facts["tb_experiment_name"] = time.strftime("%Y%m%d-%H%M%S")
    return facts


def init_tracking(args: Namespace, primary: bool = True) -> dict[str, Any]:
    """Open the sinks of this process.

    Returns:
        the facts that the other processes need and no flag gave (``run_folder``, ``wandb_run_id``,
        ``tb_experiment_name``); the driver records them: ``record_runtime(args, **init_tracking(args))``.  Empty
        unless primary.
    """
    facts = _new_run_facts(args) if primary else {}
    _close()
    _Process.trackers = make_trackers(Namespace(**{**vars(args), **facts}), primary=primary)
    atexit.register(_close)
    return facts


def log(args: Namespace, metrics: Mapping[str, Any], step_key: str) -> None:
    """Send one record to every sink of the run.  ``metrics[step_key]`` must hold the step."""
    if step_key not in metrics:
        raise KeyError(f"metrics have no {step_key!r}, the step that they belong to; they have {sorted(metrics)}")
    if _Process.trackers is None:
        init_tracking(args, primary=False)
    for tracker in _Process.trackers or ():
        tracker.log(metrics, step_key)


def finish_tracking(args: Namespace | None = None) -> None:
    """Flush and close the sinks of this process; safe to call twice, and when nothing was opened."""
    _close()


def _close() -> None:
    trackers, _Process.trackers = _Process.trackers, None
    for tracker in trackers or ():
        tracker.finish()
