"""A process's log: its format, and redaction of secrets."""

from __future__ import annotations

import logging
import sys
from argparse import Namespace

from slime.utils.redaction import redacted_text


class _Process:
    is_logging_configured = False


class RedactingFormatter(logging.Formatter):
    """Formats log lines, including tracebacks, with secrets redacted."""

    def format(self, record: logging.LogRecord) -> str:
        return redacted_text(super().format(record))


def level_of(args: Namespace) -> int:
    """Return the level of slime's own lines that ``--verbose`` asks for."""
    return logging.DEBUG if args.verbose else logging.INFO


def configure_logger(prefix: str = "", level: int = logging.INFO) -> None:
    """Log to stderr as ``[time prefix] file:line - message``.  Later calls have no effect.

    Args:
        prefix: name of the process.
        level: lowest level to log.  Below INFO it holds for slime alone, not for libraries.
    """
    if _Process.is_logging_configured:
        return
    _Process.is_logging_configured = True
    tag = f" {prefix}" if prefix else ""
    handler = logging.StreamHandler(sys.stderr)
    line = f"[%(asctime)s{tag}] %(filename)s:%(lineno)d - %(message)s"
    handler.setFormatter(RedactingFormatter(line, datefmt="%Y-%m-%d %H:%M:%S"))
    logging.basicConfig(level=max(level, logging.INFO), handlers=[handler], force=True)
    logging.getLogger("slime").setLevel(level)
    for chatty in ("httpx", "httpcore", "urllib3", "filelock"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    # slime does not use Megatron's FSDP and rerun state machine, but both log messages.
    logging.getLogger("megatron.core.distributed.fsdp").setLevel(logging.WARNING)
    logging.getLogger("megatron.core.rerun_state_machine").setLevel(logging.ERROR)
