"""Printing for the command-line tools, safe for texts and names that others chose (runs, models, folders)."""

from __future__ import annotations

import logging
import sys


def plain(text: object) -> str:
    """Return a text as one line that cannot control a terminal: control characters and the like are escaped."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in str(text))


def say(*lines: object, flush: bool = False, to_stderr: bool = False) -> None:
    """Print each line through :func:`plain`; an empty line if there are none."""
    text = "\n".join(map(plain, lines))
    print(text, flush=flush, file=sys.stderr if to_stderr else sys.stdout)


class _Plain(logging.Formatter):
    """Formats warnings, which contain the same names."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record's lines, each through :func:`plain`."""
        return "\n".join(map(plain, super().format(record).split("\n")))


if logging.lastResort is not None:
    logging.lastResort.setFormatter(_Plain())
