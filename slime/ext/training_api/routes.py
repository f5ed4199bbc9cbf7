"""Routes of clients and their sessions, of work and its answers, and of what is saved."""

from __future__ import annotations

import time
from datetime import UTC, datetime

import pydantic
from aiohttp import web
from tinker import types
from tinker.types.try_again_response import TryAgainResponse

from slime.ext.training_api.checkpoints import KINDS, SAMPLER, TRAINING, Run, State
from slime.ext.training_api.errors import Refused
from slime.ext.training_api.futures import Promise
from slime.ext.training_api.http_io import (
    OWNER,
    body_of,
    content_of,
    error_response,
    json_response,
    page_of,
    promise_response,
    promised,
)
from slime.ext.training_api.model_requests import MAX_TTL_S
from slime.ext.training_api.service import TrainingService
from slime.ext.training_api.wire import PROTOBUF, read_pass


class SessionRoutes:
    """Handlers for a service."""

    def __init__(self, service: TrainingService) -> None:
        self._service = service

    def table(self) -> list[web.RouteDef]:
        """Return method, path and handler of each."""
        return [
            web.get("/api/v1/healthz", self._health),
            web.get("/api/v1/get_server_capabilities", self._capabilities),
            web.post("/api/v1/auth/token", self._no_token),
            web.post("/api/v1/client/config", self._config),
            web.post("/api/v1/client/dynamic_config", self._dynamic_config),
            web.post("/api/v1/telemetry", self._telemetry),
            web.post("/api/v1/create_session", self._create),
            web.post("/api/v1/session_heartbeat", self._heartbeat),
            web.post("/api/v1/sessions/{session_id}/finish", self._finish),
            web.get("/api/v1/sessions", self._list),
            web.get("/api/v1/sessions/{session_id}", self._get),
        ]

    async def _health(self, request: web.Request) -> web.Response:
        dead = self._service.dead
        return json_response({"status": "ok"}) if dead is None else error_response(503, str(dead))

    async def _capabilities(self, request: web.Request) -> web.Response:
        settings = self._service.settings
        served = types.SupportedModel(
            model_name=settings.model_name,
            max_context_length=settings.limits.max_length,
            trainable=True,
            sampleable=True,
        )
        return json_response(types.GetServerCapabilitiesResponse(supported_models=[served]))

    async def _no_token(self, request: web.Request) -> web.Response:
        raise Refused("This server takes keys alone, no tokens.", 404)

    async def _config(self, request: web.Request) -> web.Response:
        await body_of(request, types.ClientConfigRequest)
        return json_response(types.ClientConfigResponse())

    async def _dynamic_config(self, request: web.Request) -> web.Response:
        await body_of(request, types.ClientConfigRequest)
        return json_response(types.ClientDynamicConfigResponse(sample_cancel_enabled=True))

    async def _telemetry(self, request: web.Request) -> web.Response:
        await content_of(request)
        return json_response(types.TelemetryResponse(status="accepted"))

    async def _create(self, request: web.Request) -> web.Response:
        body = await body_of(request, types.CreateSessionRequest)
        session = self._service.sessions.create(body, request[OWNER])
        return json_response(types.CreateSessionResponse(session_id=session.session_id))

    async def _heartbeat(self, request: web.Request) -> web.Response:
        body = await body_of(request, types.SessionHeartbeatRequest)
        self._service.sessions.of(body.session_id, request[OWNER])
        return json_response(types.SessionHeartbeatResponse())

    async def _finish(self, request: web.Request) -> web.Response:
        session = self._service.sessions.of(request.match_info["session_id"], request[OWNER])
        await self._service.end_session(session, "its client closed it.")
        return json_response(None)

    async def _list(self, request: web.Request) -> web.Response:
        sessions, _ = page_of(request, self._service.sessions.ids_of(request[OWNER]))
        return json_response(types.ListSessionsResponse(sessions=sessions))

    async def _get(self, request: web.Request) -> web.Response:
        session = self._service.sessions.of(request.match_info["session_id"], request[OWNER])
        return json_response(
            types.GetSessionResponse(
                training_run_ids=list(session.models),
                sampler_ids=list(session.samplers),
                user_metadata=session.user_metadata,
                display_name=session.display_name,
            )
        )


POLL_S = 30.0
"""A question for an answer waits so long; the client asks again."""
INLINE_BYTES = 1 << 20
"""Of an answer; a client that says so learns the size of a larger one first."""


class CancelRequest(pydantic.BaseModel):
    """Body of ``/cancel_future``."""

    request_id: str


class WorkRoutes:
    """Handlers for a service."""

    def __init__(self, service: TrainingService) -> None:
        self._service = service

    def table(self) -> list[web.RouteDef]:
        """Return method, path and handler of each."""
        models, requests = self._service.models, self._service.requests

        def unload(body: types.UnloadModelRequest, owner: str) -> Promise:
            return models.unload(body.model_id, owner)

        handlers = {
            "create_model": promised(types.CreateModelRequest, models.create),
            "unload_model": promised(types.UnloadModelRequest, unload),
            "load_weights": promised(types.LoadWeightsRequest, requests.load_weights),
            "forward_backward": self._forward_backward,
            "optim_step": promised(types.OptimStepRequest, requests.optim_step),
            "save_weights": promised(types.SaveWeightsRequest, requests.save_weights),
            "save_weights_for_sampler": promised(
                types.SaveWeightsForSamplerRequest, requests.save_weights_for_sampler
            ),
            "get_info": self._get_info,
            "create_sampling_session": self._create_sampler,
            "asample": self._sample,
            "retrieve_future": self._retrieve,
            "cancel_future": self._cancel,
        }
        posts = [web.post(f"/api/v1/{path}", handler) for path, handler in handlers.items()]
        return [*posts, web.get("/api/v1/samplers/{sampler_id}", self._get_sampler)]

    async def _forward_backward(self, request: web.Request) -> web.Response:
        message = read_pass(await content_of(request, PROTOBUF))
        return promise_response(self._service.requests.forward_backward(message, request[OWNER]))

    async def _get_info(self, request: web.Request) -> web.Response:
        body = await body_of(request, types.GetInfoRequest)
        run = self._service.sessions.with_model(body.model_id, request[OWNER])[1].run
        return json_response(
            types.GetInfoResponse(
                type="get_info",
                model_data=types.ModelData(model_name=run.base_model, tokenizer_id=run.base_model),
                model_id=run.run_id,
                is_lora=True,
                lora_rank=run.lora.rank,
                model_name=run.base_model,
            )
        )

    async def _create_sampler(self, request: web.Request) -> web.Response:
        body = await body_of(request, types.CreateSamplingSessionRequest)
        sampler_id = self._service.sampling.create(body, request[OWNER])
        return json_response(types.CreateSamplingSessionResponse(sampling_session_id=sampler_id))

    async def _get_sampler(self, request: web.Request) -> web.Response:
        sampler = self._service.sampling.sampler(request.match_info["sampler_id"], request[OWNER])
        return json_response(
            types.GetSamplerResponse(
                sampler_id=sampler.sampler_id, base_model=sampler.base_model, model_path=sampler.model_path
            )
        )

    async def _sample(self, request: web.Request) -> web.Response:
        body = await body_of(request, types.SampleRequest)
        promise, sequence_ids = self._service.sampling.sample(body, request[OWNER])
        return json_response(types.UntypedAPIFuture(request_id=promise.request_id, sample_sequence_ids=sequence_ids))

    async def _retrieve(self, request: web.Request) -> web.Response:
        body = await body_of(request, types.FutureRetrieveRequest)
        promise = self._service.promises.of(body.request_id, request[OWNER])
        if not await promise.wait(POLL_S):
            return json_response(TryAgainResponse(request_id=promise.request_id, queue_state="active"), 408)
        answer = promise.answer
        assert answer is not None
        if body.allow_metadata_only and len(answer.body) > INLINE_BYTES:
            return json_response({"status": "complete_metadata", "response_payload_size": len(answer.body)})
        promise.read_at = time.monotonic()
        return web.Response(body=answer.body, content_type=PROTOBUF if answer.is_proto else "application/json")

    async def _cancel(self, request: web.Request) -> web.Response:
        body = await body_of(request, CancelRequest)
        self._service.sampling.cancel(body.request_id, request[OWNER])
        return json_response(None)


class WeightsInfoRequest(pydantic.BaseModel):
    """Body of ``/weights_info``."""

    tinker_path: str


class TtlRequest(pydantic.BaseModel):
    """Body of ``.../ttl``."""

    ttl_seconds: int | None = pydantic.Field(default=None, ge=1, le=MAX_TTL_S)


class StateRoutes:
    """Handlers for a service."""

    def __init__(self, service: TrainingService) -> None:
        self._service, self._checkpoints = service, service.checkpoints

    def table(self) -> list[web.RouteDef]:
        """Return method, path and handler of each."""
        run = "/api/v1/training_runs/{run_id}"
        state = run + "/checkpoints/{kind}/{name}"
        return [
            web.post("/api/v1/weights_info", self._weights_info),
            web.get("/api/v1/training_runs", self._list_runs),
            web.get(run, self._get_run),
            web.get(f"{run}/checkpoints", self._list_states_of_run),
            web.get("/api/v1/checkpoints", self._list_states),
            web.delete(state, self._delete),
            web.put(f"{state}/ttl", self._set_ttl),
        ]

    async def _weights_info(self, request: web.Request) -> web.Response:
        body = await body_of(request, WeightsInfoRequest)
        state = self._checkpoints.state(body.tinker_path, request[OWNER])
        run = self._checkpoints.run(state.run_id, request[OWNER])
        return json_response(
            types.WeightsInfoResponse(
                base_model=run.base_model,
                is_lora=True,
                lora_rank=run.lora.rank,
                train_unembed=run.lora.train_unembed,
                train_mlp=run.lora.train_mlp,
                train_attn=run.lora.train_attn,
            )
        )

    async def _list_runs(self, request: web.Request) -> web.Response:
        runs, cursor = page_of(request, self._checkpoints.runs(request[OWNER]))
        shown = [self._shown(run) for run in runs]
        return json_response(types.TrainingRunsResponse(training_runs=shown, cursor=cursor))

    async def _get_run(self, request: web.Request) -> web.Response:
        return json_response(self._shown(self._checkpoints.run(request.match_info["run_id"], request[OWNER])))

    async def _list_states_of_run(self, request: web.Request) -> web.Response:
        states = self._checkpoints.states(request[OWNER], request.match_info["run_id"])
        return json_response(types.CheckpointsListResponse(checkpoints=[_checkpoint(state) for state in states]))

    async def _list_states(self, request: web.Request) -> web.Response:
        states, cursor = page_of(request, self._checkpoints.states(request[OWNER]))
        shown = [_checkpoint(state) for state in states]
        return json_response(types.CheckpointsListResponse(checkpoints=shown, cursor=cursor))

    async def _delete(self, request: web.Request) -> web.Response:
        self._service.delete_state(self._state(request))
        return json_response(None)

    async def _set_ttl(self, request: web.Request) -> web.Response:
        body = await body_of(request, TtlRequest)
        self._checkpoints.set_expiry(self._state(request), body.ttl_seconds)
        return json_response(None)

    def _state(self, request: web.Request) -> State:
        path = "tinker://{run_id}/{kind}/{name}".format(**request.match_info)
        return self._checkpoints.state(path, request[OWNER])

    def _shown(self, run: Run) -> types.TrainingRun:
        states = self._checkpoints.states(run.owner, run.run_id)
        last = {kind: next((_checkpoint(one) for one in states if one.kind == kind), None) for kind in KINDS}
        return types.TrainingRun(
            training_run_id=run.run_id,
            base_model=run.base_model,
            model_owner=run.owner,
            is_lora=True,
            lora_rank=run.lora.rank,
            last_request_time=_time(max([run.created_at, *(one.saved_at for one in states)])),
            last_checkpoint=last[TRAINING],
            last_sampler_checkpoint=last[SAMPLER],
            user_metadata=run.user_metadata,
        )


def _checkpoint(state: State) -> types.Checkpoint:
    return types.Checkpoint(
        checkpoint_id=state.checkpoint_id,
        checkpoint_type=KINDS[state.kind],  # type: ignore[arg-type]
        time=_time(state.saved_at),
        tinker_path=state.path,
        size_bytes=state.size_bytes(),
        user_metadata=state.user_metadata,
        expires_at=None if state.expires_at is None else _time(state.expires_at),
    )


def _time(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
