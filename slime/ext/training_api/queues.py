"""The order of work: each model's requests one after the other, passes of all models together.

A client numbers the requests of a model from 1 and sends several at a time, so they arrive in any order; they are done
in the order of the numbers.  While the trainer is at work, passes of every model wait, and the next call takes them
together, so that many small requests fill micro-batches.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from slime.ext.training_api.backend import Backend, BackendError, PassRequest, PassResult
from slime.ext.training_api.errors import Failed, Refused
from slime.ext.training_api.futures import Answer, Promise, Promises
from slime.ext.training_api.wire import write_pass

logger = logging.getLogger(__name__)

GATHER_S = 0.002
"""For requests of other clients to come along."""
MAX_AHEAD = 4096
"""Requests of a model that wait."""
MAX_PER_CALL = 256
"""Requests of a call: each may be a micro-batch, however few its tokens are, and the call has a deadline."""

Result = PassResult | Exception
T = TypeVar("T")


class Lost(Failed):
    """The backend did not answer in time: nobody knows what became of the model."""


async def timed(work: Awaitable[T], timeout_s: float) -> T:
    """Return what the backend gives.

    Raises:
        Lost: it gives nothing within ``timeout_s``.
    """
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            return await work
    except TimeoutError:
        if not limit.expired():
            raise
        raise Lost(f"It did not end within {timeout_s:g} s (--training-api-request-timeout-s).") from None


class PassQueue:
    """Passes of all models, on their way to the backend.

    Args:
        backend: runs them.
        tokens_per_call: a call takes no further request of a model once it has as many tokens; models take turns, so
            that none waits for more than one call of such a size.
        timeout_s: for a call.
        on_error: told what the backend raised.
    """

    def __init__(
        self, backend: Backend, tokens_per_call: int, timeout_s: float, on_error: Callable[[Exception], None]
    ) -> None:
        self._backend, self._tokens_per_call = backend, tokens_per_call
        self._timeout_s, self._on_error = timeout_s, on_error
        self._waiting: dict[str, deque[tuple[PassRequest, asyncio.Future[Result]]]] = {}
        self._is_filled = asyncio.Event()

    async def run(self, requests: Sequence[PassRequest]) -> list[Result]:
        """Return one result for each of the requests, all of one model."""
        loop = asyncio.get_running_loop()
        entries = [(request, loop.create_future()) for request in requests]
        self._waiting.setdefault(requests[0].model_id, deque()).extend(entries)
        self._is_filled.set()
        # Each has its deadline in serve().
        return list(await asyncio.gather(*(future for _, future in entries)))

    async def serve(self) -> None:
        """Run passes until cancelled."""
        while True:
            await self._is_filled.wait()
            await asyncio.sleep(GATHER_S)
            batch = self._take()
            if not batch:
                continue
            try:
                results = await timed(self._backend.passes([request for request, _ in batch]), self._timeout_s)
                if len(results) != len(batch):
                    raise BackendError(f"{len(batch)} passes have {len(results)} results")
            except Exception as error:  # the edge to the backend: a bug there fails these requests, not the service
                results = [error] * len(batch)
                self._on_error(error)
            for (_, future), result in zip(batch, results, strict=True):
                if not future.done():
                    future.set_result(result)

    def _take(self) -> list[tuple[PassRequest, asyncio.Future[Result]]]:
        batch: list[tuple[PassRequest, asyncio.Future[Result]]] = []
        tokens = 0
        while self._waiting and len(batch) < MAX_PER_CALL and (tokens < self._tokens_per_call or not batch):
            model_id, entries = next(iter(self._waiting.items()))
            del self._waiting[model_id]
            request, future = entries.popleft()
            if not future.done():  # its model may have been removed meanwhile
                batch.append((request, future))
                tokens += sum(len(datum.tokens) for datum in request.data)
            if entries:  # it goes to the end of the line
                self._waiting[model_id] = entries
        if not self._waiting:
            self._is_filled.clear()
        return batch


@dataclass(frozen=True)
class MissedPass:
    """A backward pass that was refused, so that the next step lacks its gradients."""

    why: Exception


Todo = PassRequest | Callable[[], Awaitable[Answer]] | MissedPass | None
"""A pass, something else to do, a backward pass that was refused; None: another request that was."""


@dataclass(eq=False)
class Work:
    """One request of a model, in its order."""

    seq_id: int
    promise: Promise
    what: Todo


@dataclass(eq=False)
class ModelQueue:
    """The requests of one model."""

    model_id: str
    backend: Backend
    passes: PassQueue
    promises: Promises
    timeout_s: float
    on_error: Callable[[Exception], None]
    _next: int = 1
    _early: dict[int, Work] = field(default_factory=dict)
    _ready: deque[Work] = field(default_factory=deque)
    _arrived: asyncio.Event = field(default_factory=asyncio.Event)
    _gap: str | None = None
    """Why the gradients are incomplete."""
    _broken: Exception | None = None
    """Why nothing of this model can be done any more."""
    _is_closed: bool = False
    _current: list[Work] = field(default_factory=list)
    """What is being done."""
    _gap_ends_at: float | None = None
    """When a request that did not come is given up, by the clock of the event loop."""

    def known(self, seq_id: int) -> Promise | None:
        """Return the promise of a request that came before; None for a new one.

        Raises:
            Refused: a number that is too far ahead, or whose answer is gone.
        """
        if not 1 <= seq_id < self._next + MAX_AHEAD:
            raise Refused(f"seq_id is {seq_id}; it must be from {self._next} to {self._next + MAX_AHEAD - 1}.")
        promise = self.promises.known(self._id(seq_id))
        if promise is None and seq_id < self._next:
            raise Refused(f"seq_id is {seq_id}, which was done, and its answer is gone.", 410)
        return promise

    def submit(self, seq_id: int, owner: str, what: Todo) -> Promise:
        """Put a request in its place, and return its promise."""
        work = Work(seq_id, self.promises.make(self._id(seq_id), owner), what)
        self._early[seq_id] = work
        was_next = self._next
        while self._next in self._early:
            self._ready.append(self._early.pop(self._next))
            self._next += 1
        if not self._early:
            self._gap_ends_at = None
        elif self._gap_ends_at is None or self._next > was_next:  # others that come early do not put it off
            self._gap_ends_at = asyncio.get_running_loop().time() + self.timeout_s
        self._arrived.set()
        return work.promise

    def _id(self, seq_id: int) -> str:
        return f"{self.model_id}:{seq_id}"

    async def serve(self) -> None:
        """Do what comes, until :meth:`close`."""
        while (work := await self._take()) is not None:
            self._current = [work]
            try:
                await self._serve(work)
            except Exception as error:  # a bug fails these requests, not those that follow
                logger.exception("A request of model %s failed.", self.model_id)
                for one in self._current:
                    self._miss(one, error)
            finally:  # cancelled, too
                for one in self._current:
                    one.promise.fail(self._broken or Failed("The model was removed while it worked."))

    async def _serve(self, work: Work) -> None:
        if self._broken is not None:
            work.promise.fail(self._broken)
        elif isinstance(work.what, MissedPass):
            self._miss(work, work.what.why)
        elif work.what is None:
            work.promise.fail(Failed("The request was refused.", by_user=True))
        elif isinstance(work.what, PassRequest):
            self._current += self._more_passes()
            await self._pass(self._current)
        else:
            await self._do(work, work.what)

    def end(self, error: Exception) -> None:
        """Answer what waits with ``error``, and what may still come."""
        self._broken = error
        for work in (*self._ready, *self._early.values()):
            work.promise.fail(error)
        self._ready.clear()
        self._early.clear()
        self._gap_ends_at = None

    def close(self, error: Exception) -> None:
        """End with ``error``, and let :meth:`serve` return when what it does is done."""
        self._is_closed = True
        self.end(error)
        self._arrived.set()

    async def _take(self) -> Work | None:
        while not self._ready:
            if self._is_closed:
                return None
            self._arrived.clear()
            try:
                # Without an early one there is nothing that a deadline could end.
                async with asyncio.timeout_at(self._gap_ends_at):
                    await self._arrived.wait()
            except TimeoutError:
                self._skip_gap()
        return self._ready.popleft()

    def _skip_gap(self) -> None:
        self._gap_ends_at = None
        missing, first = self._next, min(self._early, default=self._next)
        for seq_id in range(missing, first):
            lost = Failed(f"Request {seq_id} of the model never came; what came after it is not done.", by_user=True)
            self._gap = str(lost)
        for seq_id in sorted(self._early):
            self._early.pop(seq_id).promise.fail(Failed(f"Request {missing} of the model never came.", by_user=True))
            self._next = seq_id + 1

    def _more_passes(self) -> list[Work]:
        more: list[Work] = []
        while self._ready and isinstance(self._ready[0].what, PassRequest):
            more.append(self._ready.popleft())
        return more

    async def _pass(self, works: list[Work]) -> None:
        requests = [work.what for work in works if isinstance(work.what, PassRequest)]
        for work, request, result in zip(works, requests, await self.passes.run(requests), strict=True):
            if isinstance(result, PassResult):
                work.promise.resolve(Answer(write_pass(result), is_proto=True))
            elif request.backward or isinstance(result, Lost):
                self._miss(work, result)
            else:
                work.promise.fail(result)

    def _miss(self, work: Work, error: Exception) -> None:
        """Fail a request whose gradients the next step would need."""
        work.promise.fail(error)
        if self._gap is None:
            self._gap = f"request {work.seq_id} failed: {error}"
        if isinstance(error, Lost):
            self.end(Failed(f"The state of the model is not known: {error} Load a saved state into a new one."))

    async def step(self, step: Callable[[], Awaitable[Answer]]) -> Answer:
        """Take a step, or drop the gradients of a batch of which a part failed.

        Raises:
            Failed: the gradients are incomplete.
        """
        if self._gap is None:
            return await step()
        await self.backend.drop_gradients(self.model_id)
        gap, self._gap = self._gap, None
        raise Failed(f"No step was taken, and the gradients are dropped: {gap}", by_user=True)

    async def _do(self, work: Work, what: Callable[[], Awaitable[Answer]]) -> None:
        try:
            work.promise.resolve(await timed(what(), self.timeout_s))
        except Lost as error:
            self._miss(work, error)
        except Exception as error:  # the edge to the backend: a bug there fails this request, not the service
            work.promise.fail(error)
            self.on_error(error)
