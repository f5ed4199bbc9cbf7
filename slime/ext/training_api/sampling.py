"""Sampling clients and their requests."""

from __future__ import annotations

import asyncio
import logging

from tinker import types

from slime.ext.training_api.backend import Backend
from slime.ext.training_api.checkpoints import Checkpoints
from slime.ext.training_api.errors import Failed, Refused
from slime.ext.training_api.futures import Answer, BackendLife, Promise, Promises, Tasks
from slime.ext.training_api.models import check_base, usable_state
from slime.ext.training_api.queues import timed
from slime.ext.training_api.samplers import Samplers, SamplingSession
from slime.ext.training_api.sessions import Session, Sessions, checked_number
from slime.ext.training_api.settings import ServiceSettings
from slime.ext.training_api.wire import read_sampling, write_sample

logger = logging.getLogger(__name__)

MAX_OPEN_SAMPLES = 4096
"""Sampling requests of a session at a time, beyond which its client waits and asks again."""


class Sampling:
    """What clients ask of samplers.  Every method takes ``owner``, who asks, and raises ``Refused``.

    Args:
        backend: has the engines.
        settings: what is served, and the quotas.
        sessions: the clients.
        promises: for answers.
        checkpoints: the saved states.
        samplers: the adapters in the engines.
        life: of the backend.
        tasks: for open requests.
    """

    def __init__(
        self,
        backend: Backend,
        settings: ServiceSettings,
        sessions: Sessions,
        promises: Promises,
        checkpoints: Checkpoints,
        samplers: Samplers,
        life: BackendLife,
        tasks: Tasks,
    ) -> None:
        self._backend, self._settings, self._sessions, self._promises = backend, settings, sessions, promises
        self._checkpoints, self._samplers, self._life, self._tasks = checkpoints, samplers, life, tasks

    def create(self, request: types.CreateSamplingSessionRequest, owner: str) -> str:
        """Let a client sample from the base model or a saved adapter; return the id of the sampler."""
        session = self._sessions.of(request.session_id, owner)
        number = checked_number(request.sampling_session_seq_id, "sampling_session_seq_id")
        sampler_id = f"{session.session_id}:sample:{number}"
        known = session.samplers.get(sampler_id)
        if known is not None:
            if known.model_path != request.model_path or isinstance(known.source, str):
                raise Refused(f"sampling_session_seq_id is {number}, which the session has used for another model.")
            return sampler_id
        base, path = self._settings.model_name, request.model_path
        if request.base_model is not None:
            check_base(self._settings, request.base_model)
        if path is None and request.base_model is None:
            raise Refused("model_path and base_model are missing; give one.")
        folder = None if path is None else usable_state(self._checkpoints, self._settings, path, owner).folder
        session.samplers[sampler_id] = SamplingSession(sampler_id, session.session_id, base, path, folder)
        return sampler_id

    def sampler(self, sampler_id: str, owner: str) -> SamplingSession:
        """Return what a client samples from."""
        session = self._sessions.of(sampler_id.partition(":")[0], owner)
        if sampler_id not in session.samplers:
            raise Refused(f"No sampling session {sampler_id[:200]!r} is in the session.", 404)
        return session.samplers[sampler_id]

    def sample(self, request: types.SampleRequest, owner: str) -> tuple[Promise, list[str]]:
        """Draw sequences; returns the ids of the sequences too."""
        self._life.check()
        if request.sampling_session_id is None:
            raise Refused("sampling_session_id is missing; sample by a sampling session.")
        sampler = self.sampler(request.sampling_session_id, owner)
        session = self._sessions.of(sampler.session_id, owner)
        request_id = f"{sampler.sampler_id}:{checked_number(request.seq_id, 'seq_id')}"
        tokens, params = read_sampling(request, self._settings.limits)
        sequence_ids = [f"{request_id}:{i}" for i in range(request.num_samples)]
        if (known := self._promises.known(request_id)) is not None:
            return known, sequence_ids
        if len(session.samples) >= MAX_OPEN_SAMPLES:
            raise Refused(f"{MAX_OPEN_SAMPLES} sampling requests are open; ask again later.", 429)
        promise = self._promises.make(request_id, owner)

        async def draw() -> None:
            async with self._samplers.use(sampler.source) as name:
                result = await self._backend.sample(
                    name, tokens, params, request.num_samples, bool(request.prompt_logprobs),
                    request.topk_prompt_logprobs,
                )  # fmt: skip
            promise.resolve(Answer(write_sample(result, request.prompt_logprobs_last_n), is_proto=True))

        async def sample() -> None:
            try:
                await timed(draw(), self._settings.request_timeout_s)
            except Exception as error:  # the edge to the backend: a bug there fails this request, not the service
                promise.fail(error)
                self._life.note(error)

        def ended(task: asyncio.Task[None]) -> None:
            # Not in sample(), which a cancellation may keep from beginning.
            session.samples.pop(request_id, None)
            promise.fail(Failed("The request was cancelled."))

        session.samples[request_id] = self._tasks.start(sample())
        session.samples[request_id].add_done_callback(ended)
        return promise, sequence_ids

    def cancel(self, request_id: str, owner: str) -> None:
        """Stop a sampling request that nobody waits for any more; others run on."""
        self._promises.of(request_id, owner)
        session = self._sessions.of(request_id.partition(":")[0], owner)
        if request_id in session.samples:
            session.samples[request_id].cancel()

    async def end(self, session: Session) -> None:
        """Drop the snapshots of a session that has ended."""
        for sampler in session.samplers.values():
            if isinstance(sampler.source, str) and self._life.dead is None:
                try:
                    await self._samplers.drop(sampler.source)
                except Exception as error:  # the edge to the backend: the others are dropped all the same
                    logger.exception("Sampler %s was not dropped.", sampler.sampler_id)
                    self._life.note(error)
