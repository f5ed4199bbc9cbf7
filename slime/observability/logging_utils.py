"""The format of the log, the names by which plug-ins log metrics, and the metrics of rollouts and evaluations."""

from __future__ import annotations

import logging
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

from slime.observability import telemetry
from slime.observability.rollout_metrics import compute_eval_record, compute_rollout_record
from slime.utils.errors import DataError
from slime.utils.misc import call_hook
from slime.utils.redaction import redacted_text
from slime.utils.types import Sample


class _Process:
    is_logging_configured = False


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
    """Open the sinks of metrics of this process.

    Returns:
        ``slime.observability.telemetry.values_of_the_run``.
    """
    return telemetry.start_metrics(args, primary=primary)


def log(args: Namespace, metrics: Mapping[str, Any], step_key: str) -> None:
    """Send one record to every sink of the run, see ``slime.observability.telemetry.log``."""
    telemetry.log(metrics, step_key, args)


def finish_tracking(args: Namespace | None = None) -> None:
    """Flush and close the sinks of this process; safe to call twice, and when nothing was opened."""
    telemetry.stop()


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
