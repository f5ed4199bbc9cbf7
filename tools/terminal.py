"""What the command-line tools print: runs, models and folders have texts and names that others chose."""

from __future__ import annotations

import logging
import sys


def plain(text: object) -> str:
    """Return a text as one line that a terminal only shows: control characters and the like become escapes."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in str(text))


def say(*lines: object, flush: bool = False, to_stderr: bool = False) -> None:
    """Print each line, :func:`plain`; an empty one without any."""
    text = "\n".join(map(plain, lines))
    print(text, flush=flush, file=sys.stderr if to_stderr else sys.stdout)


class _Plain(logging.Formatter):
    """The form of warnings, which are about the same names."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record's lines, each :func:`plain`."""
        return "\n".join(map(plain, super().format(record).split("\n")))


if logging.lastResort is not None:
    logging.lastResort.setFormatter(_Plain())
