"""Sessions of clients, the models that they train, and what they sample from.

A session lives while its client is heard from: heartbeats, every ten seconds, or any request.  With it go its models;
what was saved stays.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any

from tinker import types

from slime.ext.training_api.backend import AdamParams, Backend, BackendDied, LoraSpec, PassRequest, RequestRefused
from slime.ext.training_api.checkpoints import SAMPLER, TRAINING, Checkpoints, Run, State, check_name
from slime.ext.training_api.errors import Failed, Refused
from slime.ext.training_api.futures import Answer, Promise, Promises
from slime.ext.training_api.losses import check_pass
from slime.ext.training_api.queues import MissedPass, ModelQueue, PassQueue, Todo, timed
from slime.ext.training_api.samplers import Samplers, SamplingSession
from slime.ext.training_api.settings import ServiceSettings
from slime.ext.training_api.wire import pass_request, read_adam, read_sampling, write_sample
from slime.utils.http_utils import encode_json

logger = logging.getLogger(__name__)

HOUSEKEEPING_S = 5.0
"""Between two looks at what is old; a shorter --training-api-session-timeout-s has more."""
CLOSE_S = 60.0
"""For what a model does when its client is gone."""
MAX_OPEN_SAMPLES = 4096
"""Sampling requests at a time, beyond which clients wait and ask again."""
MAX_METADATA_BYTES = 64 << 10
MAX_TTL_S = 10 * 366 * 86400
NOT_SERVED_TOKEN = "weights_access_token is not served: a state belongs to the key that saved it; leave it out."


@dataclass(eq=False)
class Model:
    """A model in training."""

    run: Run
    queue: ModelQueue
    task: asyncio.Task[None]


@dataclass(eq=False)
class Session:
    """What a client has here."""

    session_id: str
    owner: str
    user_metadata: dict[str, Any] | None
    display_name: str | None
    heard_at: float = field(default_factory=time.monotonic)
    models: dict[str, Model] = field(default_factory=dict)
    samplers: dict[str, SamplingSession] = field(default_factory=dict)


class TrainingService:
    """Everything that clients may ask for, without HTTP.

    Every method takes ``owner``, who asks, and raises ``Refused`` for what is not accepted.

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
        self.dead: Exception | None = None
        """Why the backend has ended."""
        self._on_death = on_death
        self._backend = backend
        self._passes = PassQueue(backend, settings.tokens_per_call, settings.request_timeout_s, self._die)
        self._samplers = Samplers(backend, settings.max_samplers, settings.request_timeout_s)
        self._sessions: dict[str, Session] = {}
        self._num_models = 0
        self._samples: dict[str, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Begin to work."""
        self._start(self._passes.serve())
        self._start(self._keep_house())

    async def stop(self) -> None:
        """Answer everything that is open, end what runs, and close the backend."""
        self.promises.fail_all(Failed("The server was stopped; what was saved is there when it starts again."))
        tasks = {*self._tasks, *self._samples.values()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_S)
        await timed(self._backend.close(), CLOSE_S)

    # --- sessions

    def create_session(self, request: types.CreateSessionRequest, owner: str) -> str:
        """Begin a session."""
        if len(self._sessions) >= self.settings.max_sessions:
            raise Refused(
                f"{len(self._sessions)} clients are here, as many as may be (--training-api-max-sessions); close one.",
                403,
            )
        metadata = _checked_metadata(request.user_metadata)
        session = Session(uuid.uuid4().hex, owner, metadata, request.display_name)
        self._sessions[session.session_id] = session
        logger.info("Session %s began.", session.session_id)
        return session.session_id

    def session(self, session_id: str, owner: str) -> Session:
        """Return a session, which is heard from now."""
        session = self._sessions.get(session_id)
        if session is None or session.owner != owner:
            raise Refused(f"No session {session_id[:200]!r} is on this server: it has ended, or the server has.", 410)
        session.heard_at = time.monotonic()
        return session

    def sessions(self, owner: str) -> list[str]:
        """Return the sessions of ``owner``, the newest first."""
        return [one.session_id for one in reversed(self._sessions.values()) if one.owner == owner]

    async def end_session(self, session: Session, why: str) -> None:
        """End a session, its models and its snapshots."""
        if self._sessions.pop(session.session_id, None) is None:
            return
        logger.info("Session %s ends: %s", session.session_id, why)
        error = Failed(f"The session has ended: {why}")
        for request_id, task in list(self._samples.items()):
            if request_id.startswith(f"{session.session_id}:"):
                task.cancel()
        for model in list(session.models.values()):
            await self._remove(session, model, error)
        for sampler in session.samplers.values():
            if isinstance(sampler.source, str) and self.dead is None:
                await self._samplers.drop(sampler.source)

    async def _keep_house(self) -> None:
        limit_s = self.settings.session_timeout_s
        while True:
            await asyncio.sleep(min(HOUSEKEEPING_S, limit_s / 4))
            self.promises.forget_old(time.monotonic())
            self.checkpoints.delete_expired(time.time())
            for session in list(self._sessions.values()):
                if time.monotonic() - session.heard_at > limit_s:
                    why = f"the client was not heard from for {limit_s:g} s (--training-api-session-timeout-s)."
                    self._start(self.end_session(session, why))

    # --- models

    def create_model(self, request: types.CreateModelRequest, owner: str) -> Promise:
        """Make a new adapter."""
        self._check_base(request.base_model)
        _check_optimizer(request.optimizer_config)
        wanted = request.lora_config
        if wanted is None:
            raise Refused("lora_config is missing; this server trains adapters alone.")
        lora = LoraSpec(wanted.rank, wanted.seed, wanted.train_attn, wanted.train_mlp, wanted.train_unembed)
        metadata = _checked_metadata(request.user_metadata)

        def answer(run: Run) -> Answer:
            return _json(types.CreateModelResponse(model_id=run.run_id))

        return self._add(request.session_id, request.model_seq_id, lora, owner, metadata, None, answer)

    def load_weights(self, request: types.LoadWeightsRequest, owner: str) -> Promise:
        """Load a saved state into a model, which is made for it where the request names none."""
        if request.weights_access_token is not None:
            raise Refused(NOT_SERVED_TOKEN)
        if request.optimizer_config is not None:
            _check_optimizer(request.optimizer_config)
        if request.base_model is not None:
            self._check_base(request.base_model)
        state = self.checkpoints.state(request.path, owner)
        if request.optimizer and state.kind != TRAINING:
            raise Refused(f"path is {request.path}, which has no optimizer state; load it without the optimizer.")
        if request.session_id is not None and request.model_seq_id is not None:
            lora = self.checkpoints.run(state.run_id, owner).lora
            load = (state, request.optimizer)

            def loaded(run: Run) -> Answer:
                return _json(types.LoadWeightsResponse(path=state.path, model_id=run.run_id, type="load_weights"))

            metadata = _checked_metadata(request.user_metadata)
            return self._add(request.session_id, request.model_seq_id, lora, owner, metadata, load, loaded)
        if request.model_id is None or request.seq_id is None:
            raise Refused("Give model_id and seq_id, or session_id and model_seq_id.")
        model = self.model(request.model_id, owner)
        if self.checkpoints.run(state.run_id, owner).lora.rank != model.run.lora.rank:
            raise Refused(f"{state.path} has another rank than the model, {model.run.lora.rank}; make a model for it.")

        async def load_state() -> Answer:
            await self._backend.load_state(model.run.run_id, state.folder, request.optimizer)
            return _json(types.LoadWeightsResponse(path=state.path, model_id=model.run.run_id, type="load_weights"))

        return self._submit(model, request.seq_id, owner, lambda: load_state)

    def _add(
        self,
        session_id: str,
        model_seq_id: int,
        lora: LoraSpec,
        owner: str,
        metadata: dict[str, Any] | None,
        load: tuple[State, bool] | None,
        answer: Callable[[Run], Answer],
    ) -> Promise:
        session = self.session(session_id, owner)
        self._check_alive()
        model_id = f"{session_id}:train:{model_seq_id}"
        if (known := self.promises.known(f"{model_id}:0")) is not None:
            return known
        if model_seq_id < 0 or model_id in session.models:
            raise Refused(f"model_seq_id is {model_seq_id}; it must be one that the session has not used.")
        if not 1 <= lora.rank <= self.settings.max_rank:
            raise Refused(f"lora_config.rank is {lora.rank}; this server takes 1 to {self.settings.max_rank}.")
        if self._num_models >= self.settings.max_models:
            raise Refused(
                f"{self._num_models} models are in training, as many as may be (--training-api-max-models); "
                "close a client, or ask again later.",
                403,
            )
        self._num_models += 1
        promise = self.promises.make(f"{model_id}:0", owner)
        run = Run(model_id, owner, self.settings.model_name, lora, time.time(), metadata)
        self._start(self._make(session, run, promise, load, answer))
        return promise

    async def _make(
        self,
        session: Session,
        run: Run,
        promise: Promise,
        load: tuple[State, bool] | None,
        answer: Callable[[Run], Answer],
    ) -> None:
        limit_s = self.settings.request_timeout_s
        try:
            await timed(self._backend.add_model(run.run_id, run.lora), limit_s)
            if load is not None:
                try:
                    await timed(self._backend.load_state(run.run_id, load[0].folder, load[1]), limit_s)
                except Exception:
                    await timed(self._backend.remove_model(run.run_id), limit_s)
                    raise
            self.checkpoints.add_run(run)
        except Exception as error:  # the edge to the backend: a bug there fails this request, not the service
            self._num_models -= 1
            promise.fail(error)
            return
        queue = ModelQueue(run.run_id, self._backend, self._passes, self.promises, limit_s, self._die)
        model = Model(run, queue, self._start(queue.serve()))
        session.models[run.run_id] = model
        if session.session_id in self._sessions:
            promise.resolve(answer(run))
        else:
            await self._remove(session, model, Failed("The session has ended."))

    async def _remove(self, session: Session, model: Model, error: Exception) -> None:
        session.models.pop(model.run.run_id, None)
        model.queue.close(error)
        _, running = await asyncio.wait({model.task}, timeout=CLOSE_S)
        if running:
            model.task.cancel()
        self._num_models -= 1
        if self.dead is None:
            try:
                await timed(self._backend.remove_model(model.run.run_id), CLOSE_S)
            except Exception:  # the edge to the backend: the session ends all the same
                logger.exception("Model %s was not removed.", model.run.run_id)
        self.checkpoints.forget_empty_run(model.run.run_id)

    def model(self, model_id: str, owner: str) -> Model:
        """Return a model in training."""
        session = self._sessions.get(model_id.partition(":")[0])
        model = None if session is None or session.owner != owner else session.models.get(model_id)
        if session is None or model is None:
            raise Refused(
                f"No model {model_id[:200]!r} is in training: its session has ended, or the server has. A saved state "
                "can be loaded into a new one.",
                404,
            )
        session.heard_at = time.monotonic()
        return model

    def unload_model(self, model_id: str, owner: str) -> Promise:
        """End the training of a model."""
        model = self.model(model_id, owner)
        session = self._sessions[model_id.partition(":")[0]]
        promise = self.promises.make(f"{model_id}:unload", owner)

        async def unload() -> None:
            await self._remove(session, model, Failed("The model was unloaded."))
            promise.resolve(_json(types.UnloadModelResponse(model_id=model_id, type="unload_model")))

        self._start(unload())
        return promise

    # --- work on a model

    def forward_backward(self, message: Any, owner: str) -> Promise:
        """Run a pass; ``message`` is a parsed ``ForwardBackwardRequest``."""
        model = self.model(message.model_id, owner)

        def request() -> PassRequest:
            asked = pass_request(message)
            limits = self.settings.limits
            try:
                check_pass(asked, vocab_size=limits.vocab_size, max_tokens=limits.max_length)
            except RequestRefused as error:
                raise Refused(str(error)) from None
            return asked

        return self._submit(model, message.seq_id, owner, request, is_backward=not message.forward_only)

    def optim_step(self, request: types.OptimStepRequest, owner: str) -> Promise:
        """Take a step with the gradients that have added up."""
        model = self.model(request.model_id, owner)

        def step() -> Callable[[], Awaitable[Answer]]:
            adam = read_adam(request.optim_params)
            return lambda: model.queue.step(lambda: self._step(model, adam))

        return self._submit(model, request.seq_id, owner, step)

    async def _step(self, model: Model, adam: AdamParams) -> Answer:
        metrics = await self._backend.optim_step(model.run.run_id, adam)
        return _json(types.OptimStepResponse(metrics=metrics))

    def save_weights(self, request: types.SaveWeightsRequest, owner: str) -> Promise:
        """Save a model with its optimizer."""

        def saved(state: State) -> Answer:
            return _json(types.SaveWeightsResponse(path=state.path, type="save_weights"))

        return self._save(request, TRAINING, owner, saved, overwrite=request.overwrite)

    def save_weights_for_sampler(self, request: types.SaveWeightsForSamplerRequest, owner: str) -> Promise:
        """Save a model for sampling: under a name, or as a snapshot of the session."""
        if request.kind != "snapshot":
            raise Refused(f"kind is {request.kind!r}; this server makes snapshots alone.")
        if request.path is not None:

            def saved(state: State) -> Answer:
                return _json(types.SaveWeightsForSamplerResponse(path=state.path, type="save_weights_for_sampler"))

            return self._save(request, SAMPLER, owner, saved, overwrite=False)
        model = self.model(request.model_id, owner)
        session = self._sessions[request.model_id.partition(":")[0]]
        if request.sampling_session_seq_id is None:
            raise Refused("sampling_session_seq_id is missing; give it, or path.")
        sampler_id = f"{session.session_id}:sample:{request.sampling_session_seq_id}"

        async def publish() -> Answer:
            await self._samplers.publish_model(model.run.run_id, sampler_id)
            base = self.settings.model_name
            session.samplers[sampler_id] = SamplingSession(sampler_id, session.session_id, base, source=sampler_id)
            fields = {"path": None, "sampling_session_id": sampler_id, "type": "save_weights_for_sampler"}
            return Answer(encode_json(fields))

        return self._submit(model, request.seq_id, owner, lambda: publish)

    def _save(
        self,
        request: types.SaveWeightsRequest | types.SaveWeightsForSamplerRequest,
        kind: str,
        owner: str,
        answer: Callable[[State], Answer],
        *,
        overwrite: bool,
    ) -> Promise:
        model = self.model(request.model_id, owner)

        def save() -> Callable[[], Awaitable[Answer]]:
            name = check_name(request.path)
            metadata = _checked_metadata(request.user_metadata)
            ttl_s = request.ttl_seconds
            if ttl_s is not None and not 1 <= ttl_s <= MAX_TTL_S:
                raise Refused(f"ttl_seconds is {ttl_s}; it must be from 1 to {MAX_TTL_S}.")

            async def run() -> Answer:
                place = self.checkpoints.next_place(model.run.run_id, kind, name, overwrite=overwrite)
                expires_at = None if ttl_s is None else place.saved_at + ttl_s
                place = replace(place, expires_at=expires_at, user_metadata=metadata)
                self.checkpoints.announce(place)
                await self._backend.save_state(model.run.run_id, place.folder, with_optimizer=kind == TRAINING)
                self.checkpoints.drop_replaced(place)
                return answer(place)

            return run

        return self._submit(model, request.seq_id, owner, save)

    def _submit(
        self,
        model: Model,
        seq_id: int | None,
        owner: str,
        read: Callable[[], Todo],
        *,
        is_backward: bool = False,
    ) -> Promise:
        """Queue what ``read`` returns; where it refuses, the request's place in the order is taken all the same."""
        self._check_alive()
        if seq_id is None:
            raise Refused("seq_id is missing.")
        known = model.queue.known(seq_id)
        if known is not None:
            return known
        try:
            return model.queue.submit(seq_id, owner, read())
        except Refused as error:
            model.queue.submit(seq_id, owner, MissedPass(error) if is_backward else None)
            raise

    # --- sampling

    def create_sampling_session(self, request: types.CreateSamplingSessionRequest, owner: str) -> str:
        """Let a client sample from the base model or a saved adapter."""
        session = self.session(request.session_id, owner)
        sampler_id = f"{session.session_id}:sample:{request.sampling_session_seq_id}"
        if sampler_id not in session.samplers:
            base, path = self.settings.model_name, request.model_path
            if request.base_model is not None:
                self._check_base(request.base_model)
            if path is None and request.base_model is None:
                raise Refused("model_path and base_model are missing; give one.")
            folder = None if path is None else self.checkpoints.state(path, owner).folder
            session.samplers[sampler_id] = SamplingSession(sampler_id, session.session_id, base, path, folder)
        return sampler_id

    def sampler(self, sampler_id: str, owner: str) -> SamplingSession:
        """Return what a client samples from."""
        session = self.session(sampler_id.partition(":")[0], owner)
        if sampler_id not in session.samplers:
            raise Refused(f"No sampling session {sampler_id[:200]!r} is in the session.", 404)
        return session.samplers[sampler_id]

    def sample(self, request: types.SampleRequest, owner: str) -> tuple[Promise, list[str]]:
        """Draw sequences; returns the ids of the sequences too."""
        self._check_alive()
        if request.sampling_session_id is None or request.seq_id is None:
            raise Refused("sampling_session_id or seq_id is missing; sample by a sampling session.")
        sampler = self.sampler(request.sampling_session_id, owner)
        request_id = f"{sampler.sampler_id}:{request.seq_id}"
        tokens, params = read_sampling(request, self.settings.limits)
        sequence_ids = [f"{request_id}:{i}" for i in range(request.num_samples)]
        if (known := self.promises.known(request_id)) is not None:
            return known, sequence_ids
        if len(self._samples) >= MAX_OPEN_SAMPLES:
            raise Refused(f"{MAX_OPEN_SAMPLES} sampling requests are open; ask again later.", 429)
        promise = self.promises.make(request_id, owner)

        async def draw() -> None:
            async with self._samplers.use(sampler.source) as name:
                result = await self._backend.sample(
                    name, tokens, params, request.num_samples, bool(request.prompt_logprobs),
                    request.topk_prompt_logprobs,
                )  # fmt: skip
            promise.resolve(Answer(write_sample(result, request.prompt_logprobs_last_n), is_proto=True))

        async def sample() -> None:
            try:
                await timed(draw(), self.settings.request_timeout_s)
            except Exception as error:  # the edge to the backend: a bug there fails this request, not the service
                promise.fail(error)
                if isinstance(error, BackendDied):
                    self._die(error)
            finally:
                promise.fail(Failed("The request was cancelled."))
                del self._samples[request_id]

        self._samples[request_id] = asyncio.create_task(sample())
        return promise, sequence_ids

    def cancel(self, request_id: str, owner: str) -> None:
        """Stop a sampling request that nobody waits for any more."""
        self.promises.of(request_id, owner)
        if request_id in self._samples:
            self._samples[request_id].cancel()

    # --- help

    def delete_state(self, state: State) -> None:
        """Delete a saved state; who samples from it gets errors from now on."""
        self.checkpoints.delete(state)
        self._start(self._samplers.drop(state.folder))

    def _check_base(self, base_model: str) -> None:
        if base_model != self.settings.model_name:
            raise Refused(f"base_model is {base_model[:200]!r}; this server has {self.settings.model_name!r} alone.")

    def _check_alive(self) -> None:
        if self.dead is not None:
            raise Refused(f"Trainer or engines have ended, and so will the server: {self.dead}", 410)

    def _die(self, error: Exception) -> None:
        if self.dead is None:
            logger.error("The backend has ended: %s", error)
            self.dead = error
            self.promises.fail_all(error)
            if self._on_death is not None:
                self._on_death()

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("A task of the service failed.", exc_info=task.exception())


def _json(response: Any) -> Answer:
    return Answer(encode_json(response.model_dump(mode="json")))


def _checked_metadata(metadata: dict[str, Any] | None) -> dict[str, Any] | None:
    if metadata is not None and (size := len(json.dumps(metadata))) > MAX_METADATA_BYTES:
        raise Refused(f"user_metadata has {size} bytes; allowed are {MAX_METADATA_BYTES}.")
    return metadata


def _check_optimizer(config: Any) -> None:
    if config.type != "adamw":
        raise Refused(f"optimizer_config.type is {config.type!r}; this server has adamw alone.")
