"""What clients ask of a model in training: passes, steps, saves and loads, done in the order of their numbers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from tinker import types

from slime.ext.training_api.backend import AdamParams, Backend, PassRequest, RequestRefused
from slime.ext.training_api.checkpoints import SAMPLER, TRAINING, Checkpoints, State, check_name
from slime.ext.training_api.errors import Failed, Refused
from slime.ext.training_api.futures import Answer, BackendLife, Promise, json_answer
from slime.ext.training_api.losses import check_pass
from slime.ext.training_api.models import Models, check_base, check_optimizer, usable_state
from slime.ext.training_api.queues import MissedPass, Todo
from slime.ext.training_api.samplers import Samplers, SamplingSession
from slime.ext.training_api.sessions import Model, Sessions, checked_metadata, checked_number
from slime.ext.training_api.settings import ServiceSettings
from slime.ext.training_api.wire import pass_request, read_adam
from slime.utils.http_utils import encode_json

MAX_TTL_S = 10 * 366 * 86400
NOT_SERVED_TOKEN = "weights_access_token is not served: a state belongs to the key that saved it; leave it out."


class ModelRequests:
    """The requests to models.  Every method takes ``owner``, who asks, and raises ``Refused`` for what cannot be.

    Args:
        backend: does the work.
        settings: what is served, and the quotas.
        sessions: the clients.
        models: makes a model that a state is loaded into.
        checkpoints: the saved states.
        samplers: take snapshots.
        life: of the backend.
    """

    def __init__(
        self,
        backend: Backend,
        settings: ServiceSettings,
        sessions: Sessions,
        models: Models,
        checkpoints: Checkpoints,
        samplers: Samplers,
        life: BackendLife,
    ) -> None:
        self._backend, self._settings, self._sessions, self._models = backend, settings, sessions, models
        self._checkpoints, self._samplers, self._life = checkpoints, samplers, life

    def load_weights(self, request: types.LoadWeightsRequest, owner: str) -> Promise:
        """Load a saved state into a model, which is made for it where the request names none."""
        if request.weights_access_token is not None:
            raise Refused(NOT_SERVED_TOKEN)
        if request.optimizer_config is not None:
            check_optimizer(request.optimizer_config)
        if request.base_model is not None:
            check_base(self._settings, request.base_model)
        state = usable_state(self._checkpoints, self._settings, request.path, owner)
        if request.optimizer and state.kind != TRAINING:
            raise Refused(f"path is {state.path}, which has no optimizer state; load it without the optimizer.")
        if request.session_id is not None and request.model_seq_id is not None:
            return self._models.create_from_state(request, request.session_id, request.model_seq_id, state, owner)
        if request.model_id is None or request.seq_id is None:
            raise Refused("Give model_id and seq_id, or session_id and model_seq_id.")
        _, model = self._sessions.with_model(request.model_id, owner)
        if self._checkpoints.run(state.run_id, owner).lora.rank != model.run.lora.rank:
            raise Refused(f"{state.path} has another rank than the model, {model.run.lora.rank}; make a model for it.")

        async def load_state() -> Answer:
            # Requests before this one may have saved another state under the name.
            present = self._checkpoints.state(request.path, owner)
            await self._backend.load_state(model.run.run_id, present.folder, request.optimizer)
            return json_answer(
                types.LoadWeightsResponse(path=state.path, model_id=model.run.run_id, type="load_weights")
            )

        return self._submit(model, request.seq_id, owner, lambda: load_state)

    def forward_backward(self, message: Any, owner: str) -> Promise:
        """Run a pass; ``message`` is a parsed ``ForwardBackwardRequest``."""
        _, model = self._sessions.with_model(message.model_id, owner)

        def request() -> PassRequest:
            asked = pass_request(message)
            limits = self._settings.limits
            try:
                check_pass(asked, vocab_size=limits.vocab_size, max_tokens=limits.max_length)
            except RequestRefused as error:
                raise Refused(str(error)) from None
            return asked

        return self._submit(model, message.seq_id, owner, request, is_backward=not message.forward_only)

    def optim_step(self, request: types.OptimStepRequest, owner: str) -> Promise:
        """Take a step with the gradients that have added up."""
        _, model = self._sessions.with_model(request.model_id, owner)

        def step() -> Callable[[], Awaitable[Answer]]:
            adam = read_adam(request.optim_params)
            return lambda: model.queue.step(lambda: self._step(model, adam))

        return self._submit(model, request.seq_id, owner, step)

    async def _step(self, model: Model, adam: AdamParams) -> Answer:
        metrics = await self._backend.optim_step(model.run.run_id, adam)
        return json_answer(types.OptimStepResponse(metrics=metrics))

    def save_weights(self, request: types.SaveWeightsRequest, owner: str) -> Promise:
        """Save a model with its optimizer."""

        def saved(state: State) -> Answer:
            return json_answer(types.SaveWeightsResponse(path=state.path, type="save_weights"))

        return self._save(request, TRAINING, owner, saved, overwrite=request.overwrite)

    def save_weights_for_sampler(self, request: types.SaveWeightsForSamplerRequest, owner: str) -> Promise:
        """Save a model for sampling: under a name, or as a snapshot of the session."""
        if request.kind != "snapshot":
            raise Refused(f"kind is {request.kind!r}; this server makes snapshots alone.")
        if request.path is not None:

            def saved(state: State) -> Answer:
                done = types.SaveWeightsForSamplerResponse(path=state.path, type="save_weights_for_sampler")
                return json_answer(done)

            return self._save(request, SAMPLER, owner, saved, overwrite=False)
        session, model = self._sessions.with_model(request.model_id, owner)
        number = checked_number(request.sampling_session_seq_id, "path is missing, and sampling_session_seq_id")
        sampler_id = f"{session.session_id}:sample:{number}"

        async def publish() -> Answer:
            if sampler_id in session.samplers:
                raise Failed(f"sampling_session_seq_id is {number}, which the session has used.", by_user=True)
            base = self._settings.model_name
            session.samplers[sampler_id] = SamplingSession(sampler_id, session.session_id, base, source=sampler_id)
            try:
                await self._samplers.publish_model(model.run.run_id, sampler_id)
            except BaseException:
                del session.samplers[sampler_id]
                raise
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
        _, model = self._sessions.with_model(request.model_id, owner)

        def save() -> Callable[[], Awaitable[Answer]]:
            name = check_name(request.path)
            metadata = checked_metadata(request.user_metadata)
            ttl_s = request.ttl_seconds
            if ttl_s is not None and not 1 <= ttl_s <= MAX_TTL_S:
                raise Refused(f"ttl_seconds is {ttl_s}; it must be from 1 to {MAX_TTL_S}.")

            async def run() -> Answer:
                place = self._checkpoints.next_place(model.run.run_id, kind, name, overwrite=overwrite)
                expires_at = None if ttl_s is None else place.saved_at + ttl_s
                place = replace(place, expires_at=expires_at, user_metadata=metadata)
                self._checkpoints.announce(place)
                await self._backend.save_state(model.run.run_id, place.folder, with_optimizer=kind == TRAINING)
                self._checkpoints.drop_replaced(place)
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
        self._life.check()
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
