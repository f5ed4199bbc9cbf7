"""Names by which plug-ins time work: thin forms of ``slime.observability.telemetry.span``.

    with timer("train"): ...            @timer            Timer().start("train_wait") ... Timer().end("train_wait")

``Timer().log_dict()`` gives the sums; ``reset()`` begins the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from slime.observability.telemetry import Timer, span

__all__ = ["Timer", "inverse_timer", "timer"]


def timer(name_or_function: str | Callable[..., Any]) -> Any:
    """Time ``with timer("name")``, ``@timer("name")``, or ``@timer`` (the function's name is the span's)."""
    if isinstance(name_or_function, str):
        return _timed(name_or_function)
    return _timed(name_or_function.__name__)(name_or_function)


@contextmanager
def _timed(name: str) -> Iterator[None]:
    with span(name):
        yield


@contextmanager
def inverse_timer(name: str) -> Iterator[None]:
    """Stop the running span ``name`` for the body, which is not counted."""
    Timer().end(name)
    try:
        yield
    finally:
        Timer().start(name)
