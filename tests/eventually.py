"""Waiting for asynchronous events, with a deadline at which the test fails."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_until(condition: Callable[[], T], what: str = "the condition", *, timeout_s: float = 60.0) -> T:
    """Return the result of ``condition()`` as soon as it is true.

    Raises:
        AssertionError: it was not true within ``timeout_s``; the message names ``what``.
    """
    deadline_s = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline_s, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.01)
    return value


async def until(condition: Callable[[], T], what: str = "the condition", *, timeout_s: float = 60.0) -> T:
    """The same, while the event loop runs."""
    deadline_s = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline_s, f"not within {timeout_s:g} s: {what}"
        await asyncio.sleep(0.01)
    return value
