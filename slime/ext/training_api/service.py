"""The training service without HTTP: its parts, from its start to its end."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from slime.ext.training_api.backend import Backend
from slime.ext.training_api.checkpoints import Checkpoints, State
from slime.ext.training_api.errors import Failed
from slime.ext.training_api.futures import BackendLife, Promises, Tasks
from slime.ext.training_api.model_requests import ModelRequests
from slime.ext.training_api.models import CLOSE_S, Models
from slime.ext.training_api.queues import timed
from slime.ext.training_api.samplers import Samplers
from slime.ext.training_api.sampling import Sampling
from slime.ext.training_api.sessions import Session, Sessions
from slime.ext.training_api.settings import ServiceSettings

logger = logging.getLogger(__name__)

HOUSEKEEPING_S = 5.0
"""Between two looks at what is old; a shorter --training-api-session-timeout-s has more."""


class TrainingService:
    """Everything that clients may ask for, by concept.

    Args:
        backend: does the work.
        settings: what is served, and the quotas.
        on_death: called when the backend has ended; ``dead`` then says why.
    """

    def __init__(
        self, backend: Backend, settings: ServiceSettings, on_death: Callable[[], None] | None = None
    ) -> None:
        self.settings = settings
        self.promises = Promises()
        self.checkpoints = Checkpoints(settings.folder)
        self.sessions = Sessions(settings.max_sessions)
        self._backend, self._tasks = backend, Tasks()
        self._life = life = BackendLife(self.promises, on_death)
        self._samplers = Samplers(backend, settings.max_samplers, settings.request_timeout_s)
        self.models = Models(backend, settings, self.sessions, self.promises, self.checkpoints, life, self._tasks)
        self.requests = ModelRequests(
            backend, settings, self.sessions, self.models, self.checkpoints, self._samplers, life
        )
        self.sampling = Sampling(
            backend, settings, self.sessions, self.promises, self.checkpoints, self._samplers, life, self._tasks
        )

    @property
    def dead(self) -> Exception | None:
        """Why the backend has ended; None while it lives."""
        return self._life.dead

    async def start(self) -> None:
        """Begin to work."""
        self._tasks.start(self.models.serve_passes())
        self._tasks.start(self._keep_house())

    async def stop(self) -> None:
        """Answer everything that is open, end what runs, and close the backend."""
        self.promises.fail_all(Failed("The server was stopped; what was saved is there when it starts again."))
        await self._tasks.cancel(CLOSE_S)
        await timed(self._backend.close(), CLOSE_S)

    async def end_session(self, session: Session, why: str) -> None:
        """End a session, its models and its snapshots."""
        if not self.sessions.forget(session):
            return
        logger.info("Session %s ends: %s", session.session_id, why)
        for task in list(session.samples.values()):
            task.cancel()
        for model in list(session.models.values()):
            await self.models.remove(session, model, Failed(f"The session has ended: {why}"))
        await self.sampling.end(session)

    def delete_state(self, state: State) -> None:
        """Delete a saved state; who samples from it gets errors from now on."""
        self.checkpoints.delete(state)
        self._tasks.start(self._samplers.drop(state.folder))

    async def _keep_house(self) -> None:
        limit_s = self.settings.session_timeout_s
        why = f"the client was not heard from for {limit_s:g} s (--training-api-session-timeout-s)."
        while self.dead is None:
            await asyncio.sleep(min(HOUSEKEEPING_S, limit_s / 4))
            try:
                await self._backend.check()
            except Exception as error:  # the edge to the backend
                logger.exception("The backend was not checked.")
                self._life.note(error)
            self.promises.forget_old(time.monotonic())
            for session in self.sessions.silent(limit_s):
                self._tasks.start(self.end_session(session, why))
            try:
                self.checkpoints.delete_expired(time.time())
            except OSError:  # the disk may be there the next time
                logger.exception("The folder of the states cannot be read.")
