"""Routes of work: models, samples, and the answers that come later."""

from __future__ import annotations

import time

import pydantic
from aiohttp import web
from tinker import types
from tinker.types.try_again_response import TryAgainResponse

from slime.ext.training_api.futures import Promise
from slime.ext.training_api.http_io import (
    OWNER,
    body_of,
    content_of,
    json_response,
    promise_response,
    promised,
)
from slime.ext.training_api.service import TrainingService
from slime.ext.training_api.wire import PROTOBUF, read_pass

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
