"""Code that the command-line tools share: the exit on wrong input, and their log."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager

from slime.utils.errors import SlimeError
from slime.utils.redaction import redacted_text
from tools.terminal import say

EXIT_BAD_INPUT = 2


@contextmanager
def clean_exit() -> Iterator[None]:
    """Turn a SlimeError inside the block into its message on stderr and exit code 2."""
    try:
        yield
    except SlimeError as error:
        say(*f"error: {redacted_text(str(error))}".replace("\n", "\n  ").split("\n"), to_stderr=True)
        raise SystemExit(EXIT_BAD_INPUT) from None


@contextmanager
def logged_run() -> Iterator[None]:
    """Set up the project's log for the block, which ends as in :func:`clean_exit`."""
    from slime.observability.text_log import configure_logger

    configure_logger()
    with clean_exit():
        yield


def parse_bool(text: str) -> bool:
    """Parse ``true`` or ``false`` of a command line."""
    values = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if text.lower() not in values:
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return values[text.lower()]
