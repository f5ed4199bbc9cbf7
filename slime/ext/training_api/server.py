"""The service over HTTP, with the paths and bodies of the ``tinker`` package, 0.38.0.

Whoever has a key of ``--training-api-key-file`` sees what that key made; without a file, this machine alone may ask.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from typing import Any, TypeVar

import pydantic
from aiohttp import web
from tinker import types
from tinker.types.try_again_response import TryAgainResponse

from slime.ext.training_api.checkpoints import KINDS, SAMPLER, TRAINING, Run, State
from slime.ext.training_api.errors import Refused
from slime.ext.training_api.futures import Promise
from slime.ext.training_api.service import MAX_TTL_S, TrainingService
from slime.ext.training_api.wire import PROTOBUF, read_pass
from slime.utils.http_door import own_names, refusal, with_address
from slime.utils.http_utils import encode_json

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 << 20
BODY_S = 60.0
"""For a client to send it."""
POLL_S = 30.0
"""A question for an answer waits so long; the client asks again."""
INLINE_BYTES = 1 << 20
"""Of an answer; a client that says so learns the size of a larger one first."""
MAX_PAGE = 1000
OPEN = frozenset({"/api/v1/healthz"})
"""Paths for everybody."""
LOCAL = "local"
"""Owner of what clients without a key make."""
OWNER = web.RequestKey("owner", str)

Body = TypeVar("Body", bound=pydantic.BaseModel)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class WeightsInfoRequest(pydantic.BaseModel):
    """Body of ``/weights_info``."""

    tinker_path: str


class TtlRequest(pydantic.BaseModel):
    """Body of ``.../ttl``."""

    ttl_seconds: int | None = pydantic.Field(default=None, ge=1, le=MAX_TTL_S)


class CancelRequest(pydantic.BaseModel):
    """Body of ``/cancel_future``."""

    request_id: str


class TrainingServer:
    """The routes.

    Args:
        service: does what is asked.
        keys: of the clients; without any, only this machine is let in.
    """

    def __init__(self, service: TrainingService, keys: tuple[str, ...] = ()) -> None:
        self._service = service
        self._owners = {key: hashlib.sha256(key.encode()).hexdigest()[:16] for key in keys}
        self._own_names = own_names()

    def application(self) -> web.Application:
        """Return the routes behind their guard; the service begins and ends with the application."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._guard])
        app.on_startup.append(self._start)
        app.on_shutdown.append(self._stop)
        run, state = "/api/v1/training_runs/{run_id}", "/api/v1/training_runs/{run_id}/checkpoints/{kind}/{name}"
        posts: Mapping[str, Handler] = {
            "auth/token": self._no_token,
            "client/config": self._client_config,
            "client/dynamic_config": self._client_dynamic_config,
            "telemetry": self._telemetry,
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "sessions/{session_id}/finish": self._finish_session,
            "create_model": self._promised(types.CreateModelRequest, self._service.create_model),
            "load_weights": self._promised(types.LoadWeightsRequest, self._service.load_weights),
            "unload_model": self._promised(
                types.UnloadModelRequest, lambda body, owner: self._service.unload_model(body.model_id, owner)
            ),
            "forward_backward": self._forward_backward,
            "optim_step": self._promised(types.OptimStepRequest, self._service.optim_step),
            "save_weights": self._promised(types.SaveWeightsRequest, self._service.save_weights),
            "save_weights_for_sampler": self._promised(
                types.SaveWeightsForSamplerRequest, self._service.save_weights_for_sampler
            ),
            "get_info": self._get_info,
            "weights_info": self._weights_info,
            "create_sampling_session": self._create_sampling_session,
            "asample": self._sample,
            "retrieve_future": self._retrieve,
            "cancel_future": self._cancel,
        }
        gets: Mapping[str, Handler] = {
            "/api/v1/healthz": self._health,
            "/api/v1/get_server_capabilities": self._capabilities,
            "/api/v1/sessions": self._list_sessions,
            "/api/v1/sessions/{session_id}": self._get_session,
            "/api/v1/samplers/{sampler_id}": self._get_sampler,
            "/api/v1/training_runs": self._list_runs,
            run: self._get_run,
            f"{run}/checkpoints": self._list_states_of_run,
            "/api/v1/checkpoints": self._list_states,
        }
        app.add_routes([web.post(f"/api/v1/{path}", handler) for path, handler in posts.items()])
        app.add_routes([web.get(path, handler) for path, handler in gets.items()])
        app.add_routes([web.delete(state, self._delete_state), web.put(f"{state}/ttl", self._set_ttl)])
        return app

    async def _start(self, app: web.Application) -> None:
        await self._service.start()

    async def _stop(self, app: web.Application) -> None:
        await self._service.stop()

    # --- who may ask, and what is wrong

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        at = with_address(self._own_names, request.get_extra_info("sockname"))
        refused = refusal(request.method, request.headers.items(), at, needs_json=False)
        if refused is not None:
            return _error(refused.status, refused.reason)
        owner = self._owner(request.headers.get("X-API-Key", ""))
        if owner is None and request.path not in OPEN:
            return _error(401, "X-API-Key is no key of this server (--training-api-key-file).")
        request[OWNER] = owner or LOCAL
        try:
            return await handler(request)
        except Refused as error:
            return _error(error.status, str(error))
        except web.HTTPRequestEntityTooLarge:
            return _error(413, f"The body is larger than {MAX_BODY_BYTES >> 20} MiB; send fewer data at a time.")
        except web.HTTPException as error:
            return _error(error.status, f"{request.method} {request.path[:200]}: {error.reason}. It is not served.")

    def _owner(self, key: str) -> str | None:
        if not self._owners:
            return LOCAL
        given = key.encode(errors="surrogateescape")
        # Every key is compared, so that time says nothing about which is near.
        found = [owner for known, owner in self._owners.items() if secrets.compare_digest(given, known.encode())]
        return found[0] if found else None

    async def _content(self, request: web.Request, kind: str) -> bytes:
        if request.content_type != kind:
            raise Refused(f"Content-Type is {request.content_type[:80]!r}; it must be {kind}.", 415)
        try:
            async with asyncio.timeout(BODY_S):
                return await request.read()
        except TimeoutError:
            raise Refused(f"The body was not sent within {BODY_S:.0f} s.", 408) from None

    async def _body(self, request: web.Request, model: type[Body]) -> Body:
        try:
            return model.model_validate_json(await self._content(request, "application/json"))
        except pydantic.ValidationError as error:
            what = [f"{'.'.join(map(str, one['loc'])) or 'body'}: {one['msg']}" for one in error.errors()[:5]]
            raise Refused("; ".join(what)) from None

    def _promised(self, model: type[Body], ask: Callable[[Body, str], Promise]) -> Handler:
        """Return the handler of a request whose answer comes later."""

        async def handle(request: web.Request) -> web.Response:
            body = await self._body(request, model)
            return _promise(ask(body, request[OWNER]))

        return handle

    # --- the client

    async def _health(self, request: web.Request) -> web.Response:
        dead = self._service.dead
        return _json({"status": "ok"}) if dead is None else _error(503, str(dead))

    async def _no_token(self, request: web.Request) -> web.Response:
        raise Refused("This server takes keys alone, no tokens.", 404)

    async def _client_config(self, request: web.Request) -> web.Response:
        await self._body(request, types.ClientConfigRequest)
        return _json(types.ClientConfigResponse())

    async def _client_dynamic_config(self, request: web.Request) -> web.Response:
        await self._body(request, types.ClientConfigRequest)
        return _json(types.ClientDynamicConfigResponse(sample_cancel_enabled=True))

    async def _telemetry(self, request: web.Request) -> web.Response:
        await self._content(request, "application/json")
        return _json(types.TelemetryResponse(status="accepted"))

    async def _capabilities(self, request: web.Request) -> web.Response:
        settings = self._service.settings
        served = types.SupportedModel(
            model_name=settings.model_name,
            max_context_length=settings.limits.max_length,
            trainable=True,
            sampleable=True,
        )
        return _json(types.GetServerCapabilitiesResponse(supported_models=[served]))

    async def _create_session(self, request: web.Request) -> web.Response:
        body = await self._body(request, types.CreateSessionRequest)
        return _json(types.CreateSessionResponse(session_id=self._service.create_session(body, request[OWNER])))

    async def _heartbeat(self, request: web.Request) -> web.Response:
        body = await self._body(request, types.SessionHeartbeatRequest)
        self._service.session(body.session_id, request[OWNER])
        return _json(types.SessionHeartbeatResponse())

    async def _finish_session(self, request: web.Request) -> web.Response:
        session = self._service.session(request.match_info["session_id"], request[OWNER])
        await self._service.end_session(session, "its client closed it.")
        return _json(None)

    async def _list_sessions(self, request: web.Request) -> web.Response:
        sessions, _ = _page(request, self._service.sessions(request[OWNER]))
        return _json(types.ListSessionsResponse(sessions=sessions))

    async def _get_session(self, request: web.Request) -> web.Response:
        session = self._service.session(request.match_info["session_id"], request[OWNER])
        return _json(
            types.GetSessionResponse(
                training_run_ids=list(session.models),
                sampler_ids=list(session.samplers),
                user_metadata=session.user_metadata,
                display_name=session.display_name,
            )
        )

    # --- models and samples

    async def _forward_backward(self, request: web.Request) -> web.Response:
        message = read_pass(await self._content(request, PROTOBUF))
        return _promise(self._service.forward_backward(message, request[OWNER]))

    async def _get_info(self, request: web.Request) -> web.Response:
        body = await self._body(request, types.GetInfoRequest)
        run = self._service.model(body.model_id, request[OWNER]).run
        return _json(
            types.GetInfoResponse(
                type="get_info",
                model_data=types.ModelData(model_name=run.base_model, tokenizer_id=run.base_model),
                model_id=run.run_id,
                is_lora=True,
                lora_rank=run.lora.rank,
                model_name=run.base_model,
            )
        )

    async def _create_sampling_session(self, request: web.Request) -> web.Response:
        body = await self._body(request, types.CreateSamplingSessionRequest)
        sampler_id = self._service.create_sampling_session(body, request[OWNER])
        return _json(types.CreateSamplingSessionResponse(sampling_session_id=sampler_id))

    async def _get_sampler(self, request: web.Request) -> web.Response:
        sampler = self._service.sampler(request.match_info["sampler_id"], request[OWNER])
        return _json(
            types.GetSamplerResponse(
                sampler_id=sampler.sampler_id, base_model=sampler.base_model, model_path=sampler.model_path
            )
        )

    async def _sample(self, request: web.Request) -> web.Response:
        body = await self._body(request, types.SampleRequest)
        promise, sequence_ids = self._service.sample(body, request[OWNER])
        return _json(types.UntypedAPIFuture(request_id=promise.request_id, sample_sequence_ids=sequence_ids))

    async def _retrieve(self, request: web.Request) -> web.Response:
        body = await self._body(request, types.FutureRetrieveRequest)
        promise = self._service.promises.of(body.request_id, request[OWNER])
        if not await promise.wait(POLL_S):
            pending = TryAgainResponse(request_id=promise.request_id, queue_state="active")
            return _json(pending, 408)
        answer = promise.answer
        assert answer is not None
        if body.allow_metadata_only and len(answer.body) > INLINE_BYTES:
            return _json({"status": "complete_metadata", "response_payload_size": len(answer.body)})
        promise.read_at = time.monotonic()
        return web.Response(body=answer.body, content_type=PROTOBUF if answer.is_proto else "application/json")

    async def _cancel(self, request: web.Request) -> web.Response:
        body = await self._body(request, CancelRequest)
        self._service.cancel(body.request_id, request[OWNER])
        return _json(None)

    # --- what is saved

    async def _weights_info(self, request: web.Request) -> web.Response:
        body = await self._body(request, WeightsInfoRequest)
        state = self._service.checkpoints.state(body.tinker_path, request[OWNER])
        run = self._service.checkpoints.run(state.run_id, request[OWNER])
        return _json(
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
        runs, cursor = _page(request, self._service.checkpoints.runs(request[OWNER]))
        shown = [self._shown(run) for run in runs]
        return _json(types.TrainingRunsResponse(training_runs=shown, cursor=cursor))

    async def _get_run(self, request: web.Request) -> web.Response:
        return _json(self._shown(self._service.checkpoints.run(request.match_info["run_id"], request[OWNER])))

    async def _list_states_of_run(self, request: web.Request) -> web.Response:
        states = self._service.checkpoints.states(request[OWNER], request.match_info["run_id"])
        return _json(types.CheckpointsListResponse(checkpoints=[_checkpoint(state) for state in states]))

    async def _list_states(self, request: web.Request) -> web.Response:
        states, cursor = _page(request, self._service.checkpoints.states(request[OWNER]))
        shown = [_checkpoint(state) for state in states]
        return _json(types.CheckpointsListResponse(checkpoints=shown, cursor=cursor))

    async def _delete_state(self, request: web.Request) -> web.Response:
        self._service.delete_state(self._state(request))
        return _json(None)

    async def _set_ttl(self, request: web.Request) -> web.Response:
        body = await self._body(request, TtlRequest)
        self._service.checkpoints.set_expiry(self._state(request), body.ttl_seconds)
        return _json(None)

    def _state(self, request: web.Request) -> State:
        path = "tinker://{run_id}/{kind}/{name}".format(**request.match_info)
        return self._service.checkpoints.state(path, request[OWNER])

    def _shown(self, run: Run) -> types.TrainingRun:
        states = self._service.checkpoints.states(run.owner, run.run_id)
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


def _page(request: web.Request, entries: list[Any]) -> tuple[list[Any], types.Cursor]:
    numbers = {}
    for name, default in (("limit", 20), ("offset", 0)):
        text = request.query.get(name, str(default))
        if not (text.isdecimal() and len(text) < 10):
            raise Refused(f"{name} is {text[:80]!r}; it must be a number from 0 on.")
        numbers[name] = int(text)
    offset, limit = numbers["offset"], min(numbers["limit"], MAX_PAGE)
    return entries[offset : offset + limit], types.Cursor(offset=offset, limit=limit, total_count=len(entries))


def _promise(promise: Promise) -> web.Response:
    return _json(types.UntypedAPIFuture(request_id=promise.request_id))


def _json(answer: Any, status: int = 200) -> web.Response:
    body = answer.model_dump(mode="json") if isinstance(answer, pydantic.BaseModel) else answer
    return web.Response(body=encode_json(body), status=status, content_type="application/json")


def _error(status: int, message: str) -> web.Response:
    return _json({"error": message}, status)
