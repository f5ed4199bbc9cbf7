"""The format of the log, and the names by which plug-ins log metrics."""

from __future__ import annotations

import logging
import sys
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from slime.observability import telemetry
from slime.utils.redaction import redacted_text


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
    # Megatron's FSDP and its machine that repeats steps are not used; both announce themselves.
    logging.getLogger("megatron.core.distributed.fsdp").setLevel(logging.WARNING)
    logging.getLogger("megatron.core.rerun_state_machine").setLevel(logging.ERROR)


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
