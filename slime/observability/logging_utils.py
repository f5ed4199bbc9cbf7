"""The log format, the one function through which metrics leave a process, and the records of rollouts and evaluations.

The driver calls ``init_tracking(args)``; every other process that logs calls ``init_tracking(args, primary=False)``
(or nothing: the first ``log`` does it).  ``log`` sends a record to ``metrics.jsonl``, wandb and TensorBoard.
"""

from __future__ import annotations

import atexit
import logging
import sys
import time
import uuid
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from slime.flags.observability import tracking_config
from slime.observability.metrics_file import START_KEY, MetricsFile, append_record, metrics_path
from slime.observability.rollout_metrics import compute_eval_record, compute_rollout_record
from slime.utils.errors import DataError
from slime.utils.misc import call_hook
from slime.utils.redaction import redacted_text
from slime.utils.types import Sample

logger = logging.getLogger(__name__)


class Tracker(Protocol):
    """A sink of metrics.  It never changes the record that it is given."""

    def log(self, metrics: Mapping[str, Any], step_key: str) -> None:
        """Take one record; ``metrics[step_key]`` is its place on the axis."""

    def finish(self) -> None:
        """Flush and close; no ``log`` follows."""


def make_trackers(args: Namespace, *, primary: bool) -> list[Tracker]:
    """Return the sinks that the flags ask for, in this process.  Their packages are imported only when asked for."""
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


class _Process:
    """The logging of this process, set up once."""

    is_logging_configured = False
    values_of_the_run: dict[str, Any] = {}  # noqa: RUF012  one process, one run
    trackers: list[Tracker] | None = None


class RedactingFormatter(logging.Formatter):
    """Writes lines, and what follows them of an error, without secrets."""

    def format(self, record: logging.LogRecord) -> str:
        return redacted_text(super().format(record))


def configure_logger(prefix: str = "", level: int = logging.INFO) -> None:
    """Log INFO and above to stderr as ``[time prefix] file:line - message``.  Only a process's first call acts."""
    if _Process.is_logging_configured:
        return
    _Process.is_logging_configured = True
    tag = f" {prefix}" if prefix else ""
    handler = logging.StreamHandler(sys.stderr)
    line = f"[%(asctime)s{tag}] %(filename)s:%(lineno)d - %(message)s"
    handler.setFormatter(RedactingFormatter(line, datefmt="%Y-%m-%d %H:%M:%S"))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for chatty in ("httpx", "httpcore", "urllib3", "filelock"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    # Lines about FSDP at the import of Megatron, which nothing here uses.
    logging.getLogger("megatron.core.distributed.fsdp").setLevel(logging.WARNING)


def init_tracking(args: Namespace, primary: bool = True) -> dict[str, Any]:
    """Open the sinks of this process.

    Returns:
        :func:`values_of_the_run`.
    """
    shared_values: dict[str, Any] = {}
    if primary and tracking_config(args).wandb_run_id is None:
        # For every process: a run without --save names its folder after it.
        shared_values["wandb_run_id"] = f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:6]}"
    _Process.values_of_the_run = shared_values
    finish_tracking()
    shared = Namespace(**{**vars(args), **shared_values})
    _Process.trackers = make_trackers(shared, primary=primary)
    path = metrics_path(shared)
    if primary and path is not None:
        append_record(path, {START_KEY: shared.wandb_run_id})  # so that a reader can tell a resume from a first start
    atexit.register(finish_tracking)
    return shared_values


def values_of_the_run() -> dict[str, Any]:
    """Return what ``init_tracking`` made up for the run in this process (``wandb_run_id``, with or without wandb).

    The other processes need it; the driver records it before it starts them.  Empty unless primary.
    """
    return _Process.values_of_the_run


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
    trackers, _Process.trackers = _Process.trackers, None
    for tracker in trackers or ():
        tracker.finish()


def log_rollout(
    args: Namespace, rollout_id: int, samples: Sequence[Sample], extra: Mapping[str, Any] | None, seconds: float
) -> None:
    """Log one rollout; ``--custom-rollout-log-function-path`` may do it instead by returning something true."""
    path = args.custom_rollout_log_function_path
    if path:
        if call_hook("--custom-rollout-log-function-path", path, rollout_id, args, samples, extra, seconds):
            return
    log(args, compute_rollout_record(args, rollout_id, samples, extra, seconds), step_key="rollout/step")


def log_eval(
    args: Namespace,
    rollout_id: int,
    data: Mapping[str, Mapping[str, Any]],
    extra: Mapping[str, Any] | None,
    seconds: float,
) -> dict[str, float]:
    """Log one evaluation; ``--custom-eval-rollout-log-function-path`` may do it instead.  Return the record."""
    path = args.custom_eval_rollout_log_function_path
    is_logged = False
    if path:
        is_logged = bool(call_hook("--custom-eval-rollout-log-function-path", path, rollout_id, args, data, extra))
    try:
        record = compute_eval_record(args, rollout_id, data, extra) | {"perf/time_eval_s": seconds}
    except DataError:
        if not is_logged:
            raise
        return {"perf/time_eval_s": seconds}  # rewards that only the hook can read
    if not is_logged:
        log(args, record, step_key="eval/step")
    return record
