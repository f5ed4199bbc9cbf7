"""Models in training: how they are made, found and removed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tinker import types

from slime.ext.training_api.backend import Backend, LoraSpec
from slime.ext.training_api.checkpoints import Checkpoints, Run, State
from slime.ext.training_api.errors import Failed, Refused
from slime.ext.training_api.futures import Answer, BackendLife, Promise, Promises, Tasks, json_answer
from slime.ext.training_api.queues import ModelQueue, PassQueue, timed
from slime.ext.training_api.sessions import Model, Session, Sessions, checked_metadata, checked_number
from slime.ext.training_api.settings import ServiceSettings

logger = logging.getLogger(__name__)

CLOSE_S = 60.0
"""For what a model does when its client is gone."""


@dataclass(frozen=True)
class NewModel:
    """A model as a client asks for it."""

    number: int
    lora: LoraSpec
    metadata: dict[str, Any] | None
    answer: Callable[[Run], Answer]
    state: State | None = None
    """Loaded into it."""
    with_optimizer: bool = False


class Models:
    """The models in training, at most ``settings.max_models``.

    Args:
        backend: trains them.
        settings: quotas and deadlines.
        sessions: the clients.
        promises: for answers.
        checkpoints: where runs and states are remembered.
        life: of the backend.
        tasks: for work that outlives a request.
    """

    def __init__(
        self,
        backend: Backend,
        settings: ServiceSettings,
        sessions: Sessions,
        promises: Promises,
        checkpoints: Checkpoints,
        life: BackendLife,
        tasks: Tasks,
    ) -> None:
        self._backend, self._settings, self._sessions = backend, settings, sessions
        self._promises, self._checkpoints, self._life, self._tasks = promises, checkpoints, life, tasks
        self._passes = PassQueue(backend, settings.tokens_per_call, settings.request_timeout_s, life.note)
        self._number = 0

    async def serve_passes(self) -> None:
        """Run the passes of all models until cancelled."""
        await self._passes.serve()

    def create(self, request: types.CreateModelRequest, owner: str) -> Promise:
        """Make a new adapter."""
        check_base(self._settings, request.base_model)
        check_optimizer(request.optimizer_config)
        wanted = request.lora_config
        if wanted is None:
            raise Refused("lora_config is missing; this server trains adapters alone.")
        lora = LoraSpec(wanted.rank, wanted.seed, wanted.train_attn, wanted.train_mlp)
        metadata = checked_metadata(request.user_metadata)

        def answer(run: Run) -> Answer:
            return json_answer(types.CreateModelResponse(model_id=run.run_id))

        return self._add(request.session_id, NewModel(request.model_seq_id, lora, metadata, answer), owner)

    def create_from_state(
        self, request: types.LoadWeightsRequest, session_id: str, number: int, state: State, owner: str
    ) -> Promise:
        """Make an adapter with what was saved of another."""

        def answer(run: Run) -> Answer:
            return json_answer(types.LoadWeightsResponse(path=state.path, model_id=run.run_id, type="load_weights"))

        lora, metadata = self._checkpoints.run(state.run_id, owner).lora, checked_metadata(request.user_metadata)
        return self._add(session_id, NewModel(number, lora, metadata, answer, state, request.optimizer), owner)

    def _add(self, session_id: str, wanted: NewModel, owner: str) -> Promise:
        session = self._sessions.of(session_id, owner)
        self._life.check()
        model_id = f"{session_id}:train:{checked_number(wanted.number, 'model_seq_id')}"
        if (known := self._promises.known(f"{model_id}:0")) is not None:
            return known
        if model_id in session.models:
            raise Refused(f"model_seq_id is {wanted.number}; it must be one that the session has not used.")
        if not 1 <= wanted.lora.rank <= self._settings.max_rank:
            raise Refused(f"lora_config.rank is {wanted.lora.rank}; this server takes 1 to {self._settings.max_rank}.")
        if self._number >= self._settings.max_models:
            raise Refused(
                f"{self._number} models are in training, as many as may be (--training-api-max-models); "
                "close a client, or ask again later.",
                403,
            )
        self._number += 1
        promise = self._promises.make(f"{model_id}:0", owner)
        run = Run(model_id, owner, self._settings.model_name, wanted.lora, time.time(), wanted.metadata)
        self._tasks.start(self._make(session, run, promise, wanted))
        return promise

    async def _make(self, session: Session, run: Run, promise: Promise, wanted: NewModel) -> None:
        limit_s = self._settings.request_timeout_s
        try:
            await timed(self._backend.add_model(run.run_id, run.lora), limit_s)
            try:
                if wanted.state is not None:
                    loaded = self._backend.load_state(run.run_id, wanted.state.folder, wanted.with_optimizer)
                    await timed(loaded, limit_s)
                self._checkpoints.add_run(run)
            except Exception:
                await timed(self._backend.remove_model(run.run_id), limit_s)
                raise
        except Exception as error:  # the edge to the backend: a bug there fails this request, not the service
            self._number -= 1
            promise.fail(error)
            self._life.note(error)
            return
        queue = ModelQueue(run.run_id, self._backend, self._passes, self._promises, limit_s, self._life.note)
        model = Model(run, queue, self._tasks.start(queue.serve()))
        session.models[run.run_id] = model
        if self._sessions.is_here(session):
            promise.resolve(wanted.answer(run))
        else:
            ended = Failed("The session has ended.")
            promise.fail(ended)
            await self.remove(session, model, ended)

    async def remove(self, session: Session, model: Model, error: Exception) -> None:
        """End the training of a model; what waits for it fails with ``error``."""
        if session.models.pop(model.run.run_id, None) is None:
            return
        model.queue.close(error)
        _, running = await asyncio.wait({model.task}, timeout=CLOSE_S)
        if running:
            model.task.cancel()
        self._number -= 1
        if self._life.dead is None:
            try:
                await timed(self._backend.remove_model(model.run.run_id), CLOSE_S)
            except Exception as failed:  # the edge to the backend: the session ends all the same
                logger.exception("Model %s was not removed.", model.run.run_id)
                self._life.note(failed)
        self._checkpoints.forget_empty_run(model.run.run_id)

    def unload(self, model_id: str, owner: str) -> Promise:
        """End the training of a model; asked twice, it gives the same answer."""
        known = self._promises.known(f"{model_id}:unload")
        if known is not None and known.owner == owner:
            return known
        session, model = self._sessions.with_model(model_id, owner)
        promise = self._promises.make(f"{model_id}:unload", owner)

        async def unload() -> None:
            await self.remove(session, model, Failed("The model was unloaded."))
            promise.resolve(json_answer(types.UnloadModelResponse(model_id=model_id, type="unload_model")))

        self._tasks.start(unload())
        return promise


def check_base(settings: ServiceSettings, base_model: str) -> None:
    """Refuse another base model than the server's.

    Raises:
        Refused: it is another.
    """
    if base_model != settings.model_name:
        raise Refused(f"base_model is {base_model[:200]!r}; this server has {settings.model_name!r} alone.")


def check_optimizer(config: Any) -> None:
    """Refuse another optimizer than Adam.

    Raises:
        Refused: it is another.
    """
    if config.type != "adamw":
        raise Refused(f"optimizer_config.type is {config.type!r}; this server has adamw alone.")


def usable_state(checkpoints: Checkpoints, settings: ServiceSettings, path: str, owner: str) -> State:
    """Return a saved state of this server's base model.

    Raises:
        Refused: there is none of ``owner``, or it belongs to another base model.
    """
    state = checkpoints.state(path, owner)
    base = checkpoints.run(state.run_id, owner).base_model
    if base != settings.model_name:
        raise Refused(
            f"path is {path[:200]}, an adapter of {base[:200]!r}; this server has {settings.model_name!r} alone "
            "(--training-api-model-name)."
        )
    return state
