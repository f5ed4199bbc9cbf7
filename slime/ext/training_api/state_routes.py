"""Routes of what is saved: runs and states, listed, kept for some time and deleted."""

from __future__ import annotations

from datetime import UTC, datetime

import pydantic
from aiohttp import web
from tinker import types

from slime.ext.training_api.checkpoints import KINDS, SAMPLER, TRAINING, Run, State
from slime.ext.training_api.http_io import OWNER, body_of, json_response, page_of
from slime.ext.training_api.model_requests import MAX_TTL_S
from slime.ext.training_api.service import TrainingService


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
