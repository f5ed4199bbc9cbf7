"""The log of a process: its format, and secrets kept out of it."""

from __future__ import annotations

import logging
import sys

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
