"""Timers for plug-ins: thin wrappers of ``slime.observability.telemetry.span``.

    with timer("train"): ...            @timer            Timer().start("train_wait") ... Timer().end("train_wait")

``Timer().log_dict()`` returns the sums; ``reset()`` begins the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from slime.observability.telemetry import Timer, span

__all__ = ["Timer", "inverse_timer", "timer"]


def timer(name_or_function: str | Callable[..., Any]) -> Any:
    """Use as ``with timer("name")``, ``@timer("name")``, or ``@timer`` (named after the function)."""
    if isinstance(name_or_function, str):
        return _timed(name_or_function)
    return _timed(name_or_function.__name__)(name_or_function)


@contextmanager
def _timed(name: str) -> Iterator[None]:
    with span(name):
        yield


@contextmanager
def inverse_timer(name: str) -> Iterator[None]:
    """Pause the running span ``name`` during the body."""
    Timer().end(name)
    try:
        yield
    finally:
        Timer().start(name)
