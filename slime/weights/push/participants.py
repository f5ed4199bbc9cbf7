"""The engines of a push: those that answered everything so far, and why the others were excluded.

An engine's failure is its own: one that dies, refuses or is late is *excluded*, which means that nothing more is asked
of it in this push.  It was paused at the beginning and stays so; it never serves what it holds now.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import Any

from slime.utils.errors import SlimeError
from slime.weights.push.engine import EngineProxy, Pending

logger = logging.getLogger(__name__)

PUSH_FAILURES = (SlimeError, RuntimeError, OSError, TimeoutError, EOFError)
"""The errors that an engine's refusal, its death or a lost connection raises on the rank that meets it."""
MIN_WAIT_S = 0.01


@dataclass(frozen=True, slots=True)
class ExcludedEngine:
    """An engine that a push left out.  It is paused, serves nothing, and waits to be restarted or evicted."""

    index: int
    """``EngineProxy.index``."""
    reason: str
    """Its failure, as the end of a sentence."""


def reason_of(error: BaseException) -> str:
    """Return an error as the end of a sentence."""
    return f"{type(error).__name__}: {error}"


@dataclass(frozen=True)
class PushClock:
    """The deadline of one push.

    No engine gets more than half of the time that is left: when one is late, enough remains to continue without it.
    """

    timeout_s: float
    """``--weight-update-timeout-s``."""
    started_s: float = field(default_factory=lambda: time.monotonic())

    @property
    def elapsed_s(self) -> float:
        """Seconds since the push began."""
        return time.monotonic() - self.started_s

    @property
    def step_s(self) -> float:
        """Seconds that the next answer may take."""
        return max((self.timeout_s - self.elapsed_s) / 2, MIN_WAIT_S)


class Participants:
    """The engines of one push, as this rank knows them; :meth:`merge` makes all ranks know the same."""

    def __init__(self, engines: Iterable[EngineProxy], clock: PushClock) -> None:
        self.engines = {engine.index: engine for engine in engines}
        self.clock = clock
        self.reasons: dict[int, str] = {}
        """The reason of each excluded engine, by its index."""

    @property
    def good(self) -> list[EngineProxy]:
        """The engines that are still in the push."""
        return [engine for index, engine in self.engines.items() if index not in self.reasons]

    def is_good(self, engine: EngineProxy) -> bool:
        """Return whether the engine is still in the push."""
        return engine.index not in self.reasons

    def exclude(self, index: int, reason: str) -> None:
        """Ask nothing more of an engine; the first reason counts."""
        if index not in self.reasons:
            logger.error("engine %d is excluded from the push: %s", index, reason)
            self.reasons[index] = reason

    def merge(self, reasons_of_ranks: Sequence[Mapping[int, str]]) -> None:
        """Take over what other ranks met."""
        for reasons in reasons_of_ranks:
            for index, reason in reasons.items():
                self.reasons.setdefault(index, reason)

    @property
    def excluded(self) -> tuple[ExcludedEngine, ...]:
        """The excluded engines, with their reasons."""
        return tuple(ExcludedEngine(index, reason) for index, reason in sorted(self.reasons.items()))

    def ask(
        self,
        what: str,
        call: Callable[[EngineProxy], Pending],
        engines: Iterable[EngineProxy] | None = None,
    ) -> dict[int, Any]:
        """Ask engines at once, exclude those that give no answer, and return the answers by index."""
        asked = self.good if engines is None else list(engines)
        requests = start_all(asked, call)
        answers: dict[int, Any] = {}
        deadline_s = time.monotonic() + self.clock.step_s
        for engine in asked:
            try:
                answers[engine.index] = requests[engine.index].wait(max(deadline_s - time.monotonic(), MIN_WAIT_S))
            except PUSH_FAILURES as error:
                self.exclude(engine.index, f"{reason_of(error)} (while {what})")
        return answers


@dataclass(frozen=True)
class _Failed:
    """A request that could not even be sent."""

    error: BaseException

    def wait(self, timeout_s: float) -> Any:
        """Raise the error of sending."""
        raise self.error


def start_all(engines: Iterable[EngineProxy], call: Callable[[EngineProxy], Pending]) -> dict[int, Pending]:
    """Start a request to each engine; what cannot be sent fails in its ``wait``."""
    requests: dict[int, Pending] = {}
    for engine in engines:
        try:
            requests[engine.index] = call(engine)
        except PUSH_FAILURES as error:
            requests[engine.index] = _Failed(error)
    return requests


def wait_together(
    requests: Mapping[int, Pending], timeout_s: float, on_failure: Callable[[], None] = lambda: None
) -> dict[int, BaseException]:
    """Wait for all requests at once, because one that fails may keep the others from ending.

    Args:
        on_failure: called at the first failure, to set the others free.

    Returns:
        The errors, in the order in which they came.
    """
    failures: dict[int, BaseException] = {}
    if not requests:
        return failures
    with ThreadPoolExecutor(len(requests), thread_name_prefix="weight-push") as pool:
        futures = {pool.submit(request.wait, timeout_s): index for index, request in requests.items()}
        for future in as_completed(futures):
            error = future.exception()
            if error is None:
                continue
            if not isinstance(error, PUSH_FAILURES):
                raise error
            if not failures:
                on_failure()
            failures[futures[future]] = error
    return failures
