"""Routes of clients: what the server is, and their sessions."""

from __future__ import annotations

from aiohttp import web
from tinker import types

from slime.ext.training_api.errors import Refused
from slime.ext.training_api.http_io import OWNER, body_of, content_of, error_response, json_response, page_of
from slime.ext.training_api.service import TrainingService


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
