"""How a command-line tool ends when its input is wrong: the message, exit code 2, no traceback."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from slime.utils.errors import SlimeError

EXIT_BAD_INPUT = 2


@contextmanager
def clean_exit() -> Iterator[None]:
    """Turn a SlimeError inside the block into its message on stderr and exit code 2."""
    try:
        yield
    except SlimeError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(EXIT_BAD_INPUT) from None
