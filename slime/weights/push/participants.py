"""The engines of a push: which still take part, and why the others were excluded.

An engine's failure does not fail the push: an engine that dies, refuses or is late is *excluded* and gets no further
requests in this push.  It was paused at the beginning and stays paused, so it never serves a partial update.
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
"""Errors raised on a rank by an engine's refusal or death, or by a lost connection."""
MIN_WAIT_S = 0.01


@dataclass(frozen=True, slots=True)
class ExcludedEngine:
    """An engine excluded from a push.  It is paused, serves nothing, and waits to be restarted or evicted."""

    index: int
    """``EngineProxy.index``."""
    reason: str
    """Its failure, phrased to end a sentence."""


def reason_of(error: BaseException) -> str:
    """Return an error's text, phrased to end a sentence."""
    return f"{type(error).__name__}: {error}"


@dataclass(frozen=True)
class PushClock:
    """The deadline of one push.

    No answer may take more than half of the remaining time, so enough is left to continue without a late engine.
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
    """The engines of one push, as known to this rank; :meth:`merge` synchronizes the ranks."""

    def __init__(self, engines: Iterable[EngineProxy], clock: PushClock) -> None:
        self.engines = {engine.index: engine for engine in engines}
        self.clock = clock
        self.reasons: dict[int, str] = {}
        """Index of an excluded engine -> reason."""

    @property
    def good(self) -> list[EngineProxy]:
        """The engines that still take part."""
        return [engine for index, engine in self.engines.items() if index not in self.reasons]

    def is_good(self, engine: EngineProxy) -> bool:
        """Return whether the engine still takes part."""
        return engine.index not in self.reasons

    def exclude(self, index: int, reason: str) -> None:
        """Exclude an engine; later reasons are ignored."""
        if index not in self.reasons:
            logger.error("Engine %d is excluded from the push: %s", index, reason)
            self.reasons[index] = reason

    def merge(self, reasons_of_ranks: Sequence[Mapping[int, str]]) -> None:
        """Add the exclusions found by other ranks."""
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
        """Send requests to engines in parallel, exclude those that fail to answer; return answers by engine index."""
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
    """A request that could not be sent."""

    error: BaseException

    def wait(self, timeout_s: float) -> Any:
        """Raise the error from sending."""
        raise self.error


def start_all(engines: Iterable[EngineProxy], call: Callable[[EngineProxy], Pending]) -> dict[int, Pending]:
    """Start a request to each engine; an error in sending is raised by ``wait``."""
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
    """Wait for all requests in parallel, because a failed one may block the others.

    Args:
        on_failure: called at the first failure, to unblock the others.

    Returns:
        Engine index -> error, in the order of arrival.
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
