"""The threads of a service's job: one waits for the trainer, one for the engines; and a watch for what dies."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from slime.ext.training_api.backend import BackendDied, BackendError
from slime.ext.training_api.engine_sampling import EngineSampling
from slime.ray.train_loop import TrainJob
from slime.ray.waiting import Interrupted, wait_for
from slime.utils.errors import DataError, EngineError, ProcessError

logger = logging.getLogger(__name__)

T = TypeVar("T")

WATCH_EVERY_S = 3.0
"""Until dead engines and ranks are looked for, while nothing else would find them."""


class JobThreads:
    """Runs blocking work on trainer and engines, until one of them has ended.

    Args:
        job: whose processes are watched.
        engines: those of the job.
        timeout_s: for the manager's answer.
    """

    def __init__(self, job: TrainJob, engines: EngineSampling, timeout_s: float) -> None:
        self._job, self._engines, self._timeout_s = job, engines, timeout_s
        self._trainer_thread = ThreadPoolExecutor(1, thread_name_prefix="trainer")
        self._engine_thread = ThreadPoolExecutor(1, thread_name_prefix="engines")
        self._death: BackendDied | None = None
        self._watching: asyncio.Task[None] | None = None

    async def train(self, work: Callable[[], T]) -> T:
        """Do what waits for the trainer.

        Raises:
            BackendDied: a process of the job has ended, or what a rank holds is not known any more.
        """
        return await self._in(self._trainer_thread, work)

    async def serve(self, work: Callable[[], T]) -> T:
        """Do what waits for the engines.

        Raises:
            EngineError: one of them refused.
            BackendDied: a process of the job has ended.
        """
        return await self._in(self._engine_thread, work)

    def check(self) -> None:
        """Begin to watch, and tell what was found.

        Raises:
            BackendDied: a process of the job has ended.
        """
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch())
        if self._death is not None:
            raise self._death

    async def close(self) -> None:
        """End the job, and the threads."""
        if self._watching is not None:
            self._watching.cancel()
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._trainer_thread, self._job.finish)
        except ProcessError as error:
            logger.warning("Trainer or engines did not end in an orderly way: %s", error)
        self._trainer_thread.shutdown(wait=False)
        self._engine_thread.shutdown(wait=False)

    async def _in(self, pool: ThreadPoolExecutor, work: Callable[[], T]) -> T:
        self.check()
        try:
            return await asyncio.get_running_loop().run_in_executor(pool, work)
        except (BackendError, DataError):
            raise
        except (Exception, Interrupted) as error:
            if pool is self._engine_thread and isinstance(error, EngineError):
                raise  # one engine's refusal; its death is found by the watch
            raise self._died(error) from error

    def _died(self, error: BaseException) -> BackendDied:
        if self._death is None:
            logger.error("The service ends: %s", error)
            self._death = BackendDied(f"{type(error).__name__}: {error}")
        return self._death

    async def _watch(self) -> None:
        while self._death is None:
            await asyncio.sleep(WATCH_EVERY_S)
            try:
                await asyncio.get_running_loop().run_in_executor(self._engine_thread, self._look)
                if self._job.actor.push.restarts_engines:
                    await self.train(self._job.serve_new_engines)
            except (Exception, Interrupted) as error:  # the edge of this task
                self._died(error)

    def _look(self) -> None:
        """Raise when a rank, the manager, the router or an engine that stays away has died."""
        self._engines.check_router()
        asked = self._job.manager.find_dead_engines.remote()
        wait_for(asked, what="the state of the engines", timeout_s=self._timeout_s)
