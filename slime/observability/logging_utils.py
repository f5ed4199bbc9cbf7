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
from typing import Any

from slime.flags.observability import tracking_config
from slime.observability.metrics_file import START_KEY, append_record, metrics_path
from slime.observability.tracking import Tracker, make_trackers

logger = logging.getLogger(__name__)


class _Process:
    """What this process has set up, once."""

    is_logging_configured = False
    trackers: list[Tracker] | None = None


def configure_logger(prefix: str = "", level: int = logging.INFO) -> None:
    """Log INFO and above to stderr as ``[time prefix] file:line - message``.  Only a process's first call acts."""
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
    # Lines about FSDP at the import of Megatron, which nothing here uses.
    logging.getLogger("megatron.core.distributed.fsdp").setLevel(logging.WARNING)


def _new_run_facts(args: Namespace) -> dict[str, Any]:
    """The run's id, which every process must share: the folder of a run without ``--save`` is named after it too."""
    if tracking_config(args).wandb_run_id is not None:
        return {}
    return {"wandb_run_id": f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:6]}"}


def init_tracking(args: Namespace, primary: bool = True) -> dict[str, Any]:
    """Open the sinks of this process.

    Returns:
        what the other processes need and no flag gave (``wandb_run_id``, with or without wandb); the driver records
        it: ``record_runtime(args, **init_tracking(args))``.  Empty unless primary.
    """
    facts = _new_run_facts(args) if primary else {}
    _close()
    shared = Namespace(**{**vars(args), **facts})
    _Process.trackers = make_trackers(shared, primary=primary)
    path = metrics_path(shared)
    if primary and path is not None:
        append_record(path, {START_KEY: shared.wandb_run_id})  # so that a reader can tell a resume from a first start
    atexit.register(_close)
    return facts


def log(args: Namespace, metrics: Mapping[str, Any], step_key: str) -> None:
    """Send one record to every sink of the run.  ``metrics[step_key]`` must hold the step.

    A sink whose disk is full loses the record, which is logged; training goes on.
    """
    if step_key not in metrics:
        raise KeyError(f"metrics have no {step_key!r}, the step that they belong to; they have {sorted(metrics)}")
    if _Process.trackers is None:
        init_tracking(args, primary=False)
    for tracker in _Process.trackers or ():
        try:
            tracker.log(metrics, step_key)
        except OSError as error:
            logger.error(
                "Metrics of %s %s are lost, %s cannot write: %s",
                step_key,
                metrics[step_key],
                type(tracker).__name__,
                error,
            )


def finish_tracking(args: Namespace | None = None) -> None:
    """Flush and close the sinks of this process; safe to call twice, and when nothing was opened."""
    _close()


def _close() -> None:
    trackers, _Process.trackers = _Process.trackers, None
    for tracker in trackers or ():
        tracker.finish()
