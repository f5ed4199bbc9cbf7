"""Who is still in a push: the engines that answered everything so far, and why the others were left out.

An engine's failure is its own: whoever dies, refuses or is late is *fenced*, which means that nothing more is asked of
it in this push.  It was paused at the beginning and stays so; it never serves what it holds now.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from slime.utils.errors import SlimeError
from slime.weights.receiver import ExcludedEngine, Pending, WeightReceiver

logger = logging.getLogger(__name__)

PUSH_FAILURES = (SlimeError, RuntimeError, OSError, TimeoutError, EOFError)
"""What an engine's refusal, its death or a lost connection looks like on the rank that meets it."""
MIN_WAIT_S = 0.01


def reason_of(error: BaseException) -> str:
    """An error as the end of a sentence."""
    return f"{type(error).__name__}: {error}"


@dataclass(frozen=True)
class PushClock:
    """The deadline of one push.

    No engine gets more than half of the time that is left: when one is late, enough remains to go on without it.
    """

    timeout_s: float
    """``--weight-update-timeout-s``."""
    started_s: float = field(default_factory=monotonic)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the push began."""
        return monotonic() - self.started_s

    @property
    def step_s(self) -> float:
        """How long the next answer may take."""
        return max((self.timeout_s - self.elapsed_s) / 2, MIN_WAIT_S)


class Roster:
    """The engines of one push, as this rank knows them; :meth:`merge` makes all ranks know the same."""

    def __init__(self, receivers: Iterable[WeightReceiver]) -> None:
        self.receivers = {receiver.index: receiver for receiver in receivers}
        self.reasons: dict[int, str] = {}
        """Why an engine is fenced, by its index."""

    @property
    def good(self) -> list[WeightReceiver]:
        """The engines that are still in the push."""
        return [receiver for index, receiver in self.receivers.items() if index not in self.reasons]

    def is_good(self, receiver: WeightReceiver) -> bool:
        """Whether the engine is still in the push."""
        return receiver.index not in self.reasons

    def fence(self, index: int, reason: str) -> None:
        """Leave an engine out from now on; the first reason counts."""
        if index not in self.reasons:
            logger.error("engine %d is fenced: %s", index, reason)
            self.reasons[index] = reason

    def merge(self, reasons_of_ranks: Sequence[Mapping[int, str]]) -> None:
        """Take over what other ranks met."""
        for reasons in reasons_of_ranks:
            for index, reason in reasons.items():
                self.reasons.setdefault(index, reason)

    @property
    def fenced(self) -> tuple[ExcludedEngine, ...]:
        """The engines left out, with their reasons."""
        return tuple(ExcludedEngine(index, reason) for index, reason in sorted(self.reasons.items()))

    def ask(
        self,
        what: str,
        call: Callable[[WeightReceiver], Pending],
        clock: PushClock,
        *,
        engines: Iterable[WeightReceiver] | None = None,
    ) -> dict[int, Any]:
        """The answers of all good engines, asked at once; who gives none is fenced.

        Args:
            what: what was asked, as in "while ...".
            call: starts the request.
            clock: of the push.
            engines: those to ask; all by default.
        """
        asked = [
            engine for engine in (self.receivers.values() if engines is None else engines) if self.is_good(engine)
        ]
        requests = start_all(asked, call)
        answers: dict[int, Any] = {}
        deadline_s = monotonic() + clock.step_s
        for engine in asked:
            try:
                answers[engine.index] = requests[engine.index].wait(max(deadline_s - monotonic(), MIN_WAIT_S))
            except PUSH_FAILURES as error:
                self.fence(engine.index, f"{reason_of(error)} (while {what})")
        return answers


@dataclass(frozen=True)
class _Failed:
    """A request that could not even be sent."""

    error: BaseException

    def wait(self, timeout_s: float) -> Any:
        raise self.error


def start_all(engines: Iterable[WeightReceiver], call: Callable[[WeightReceiver], Pending]) -> dict[int, Pending]:
    """Requests to the engines, by their index; what cannot be sent fails in its ``wait``."""
    requests: dict[int, Pending] = {}
    for engine in engines:
        try:
            requests[engine.index] = call(engine)
        except PUSH_FAILURES as error:
            requests[engine.index] = _Failed(error)
    return requests


def wait_together(
    requests: Mapping[int, Pending], timeout_s: float, on_failure: Callable[[], None]
) -> dict[int, BaseException]:
    """Wait for all requests at once, because one that fails may keep the others from ending.

    Args:
        requests: by engine.
        timeout_s: of each.
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
