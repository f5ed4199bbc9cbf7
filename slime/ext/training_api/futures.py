"""Answers that come later: a request gets an id at once, and the client asks for the answer by it.

The id follows from the request's place in its session, so that a request that is sent again, because its first
answer was lost, gets the same id and is done once.  Beside it, what works on answers, and whether it still can.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from slime.ext.training_api.backend import BackendDied, RequestRefused
from slime.ext.training_api.errors import Failed, Refused
from slime.utils.errors import DataError
from slime.utils.http_utils import encode_json
from slime.utils.redaction import redacted_text

logger = logging.getLogger(__name__)

KEEP_READ_S = 60.0
"""A client whose connection broke may ask for an answer again."""
KEEP_S = 3600.0
"""An answer that nobody asks for."""
MAX_ANSWER_BYTES = 2**30
"""Of all answers together."""


@dataclass(frozen=True)
class Answer:
    """The body of an answer: JSON, or a protobuf message."""

    body: bytes
    is_proto: bool = False


def json_answer(response: Any) -> Answer:
    """Return a message of the protocol, a model of pydantic, as an answer."""
    return Answer(encode_json(response.model_dump(mode="json")))


def failure(error: BaseException) -> Answer:
    """Return the answer to a request that ended in ``error``."""
    by_user = error.by_user if isinstance(error, Failed) else isinstance(error, RequestRefused | DataError)
    message = redacted_text(str(error) or type(error).__name__)
    return Answer(encode_json({"error": message, "category": "user" if by_user else "server"}))


@dataclass(eq=False)
class Promise:
    """The answer to one request, now or later."""

    request_id: str
    owner: str
    """Who may ask for it."""
    _done: asyncio.Event = field(default_factory=asyncio.Event)
    answer: Answer | None = None
    error: BaseException | None = None
    finished_at: float = 0.0
    read_at: float | None = None

    @property
    def is_done(self) -> bool:
        """True once there is an answer."""
        return self.answer is not None

    def resolve(self, answer: Answer) -> None:
        """Give the answer; the first one counts."""
        if self.answer is None:
            self.answer, self.finished_at = answer, time.monotonic()
            self._done.set()

    def fail(self, error: BaseException) -> None:
        """Answer with an error."""
        if self.answer is None:
            self.error = error
            self.resolve(failure(error))

    async def wait(self, timeout_s: float) -> bool:
        """Return True when there is an answer within ``timeout_s``."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._done.wait()
        except TimeoutError:
            return False
        return True


class Promises:
    """Every promise that may still be asked for."""

    def __init__(self) -> None:
        self._by_id: dict[str, Promise] = {}

    def make(self, request_id: str, owner: str) -> Promise:
        """Return a new promise."""
        promise = self._by_id[request_id] = Promise(request_id, owner)
        return promise

    def known(self, request_id: str) -> Promise | None:
        """Return the promise of a request that came before."""
        return self._by_id.get(request_id)

    def of(self, request_id: str, owner: str) -> Promise:
        """Return the promise with this id.

        Raises:
            Refused: there is none, which the client takes for a lost answer (410).
        """
        promise = self._by_id.get(request_id)
        if promise is None or promise.owner != owner:
            raise Refused(
                f"request_id {request_id[:200]!r} is not known: the server was started again, or its answer was kept "
                f"for {KEEP_S:.0f} s and not asked for.",
                410,
            )
        return promise

    def forget_old(self, now: float) -> None:
        """Drop answers that were read, or that nobody asked for; ``now`` is of the monotonic clock.

        Where all together are too large, those of the session that has most go first, so that a client which reads
        none of its answers costs no other client one.
        """
        sizes: dict[str, int] = defaultdict(int)
        by_session: dict[str, list[Promise]] = defaultdict(list)
        for one in sorted(self._by_id.values(), key=lambda one: one.finished_at):
            if one.answer is None:
                continue
            was_read = one.read_at is not None and now - one.read_at > KEEP_READ_S
            if was_read or now - one.finished_at > KEEP_S:
                del self._by_id[one.request_id]
            else:
                session_id = one.request_id.partition(":")[0]
                by_session[session_id].append(one)
                sizes[session_id] += len(one.answer.body)
        while sum(sizes.values()) > MAX_ANSWER_BYTES:
            largest = max(sizes, key=lambda session_id: sizes[session_id])
            oldest = by_session[largest].pop(0)
            del self._by_id[oldest.request_id]
            sizes[largest] -= 0 if oldest.answer is None else len(oldest.answer.body)

    def fail_all(self, error: BaseException) -> None:
        """Answer everything that is open with ``error``."""
        for promise in self._by_id.values():
            promise.fail(error)


class Tasks:
    """Running coroutines; what one of them raises is logged."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run ``work`` in a task."""
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    async def cancel(self, timeout_s: float) -> None:
        """Cancel everything, and wait until it has ended."""
        tasks = set(self._running)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("A task of the service failed.", exc_info=task.exception())


class BackendLife:
    """The one place that knows of the backend's end.

    Args:
        promises: answered with the error when the backend has ended.
        on_death: called then; ``dead`` says why.
    """

    def __init__(self, promises: Promises, on_death: Callable[[], None] | None) -> None:
        self.dead: Exception | None = None
        """Why the backend has ended."""
        self._promises, self._on_death = promises, on_death

    def check(self) -> None:
        """Refuse a request to a backend that has ended.

        Raises:
            Refused: it has.
        """
        if self.dead is not None:
            raise Refused(f"Trainer or engines have ended, and so will the server: {self.dead}", 410)

    def note(self, error: BaseException) -> None:
        """Take notice of what the backend raised."""
        if isinstance(error, BackendDied) and self.dead is None:
            logger.error("The backend has ended: %s", error)
            self.dead = error
            self._promises.fail_all(error)
            if self._on_death is not None:
                self._on_death()
