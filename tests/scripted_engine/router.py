"""A router in front of scripted engines: ``/workers``, and ``/generate`` handed on in turn."""

from __future__ import annotations

import itertools
from typing import Any

import aiohttp
from aiohttp import web

from tests.scripted_engine.server import ThreadedServer


class ScriptedRouter(ThreadedServer):
    """Hands requests on unchanged.  A worker that cannot be reached costs the request a 500, as with sglang-router."""

    def __init__(self, worker_urls: list[str], *, host: str = "127.0.0.1", port: int = 0) -> None:
        super().__init__(host=host, port=port)
        self.worker_urls = list(worker_urls)
        self.unhealthy: set[str] = set()
        self._turn = itertools.count()
        self._session: aiohttp.ClientSession | None = None

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/generate", self._generate),
            web.get("/workers", self._list),
            web.post("/workers", self._add),
            web.delete("/workers/{id:.*}", self._remove),
            web.get("/health", self._health),
        ]

    def on_start(self) -> None:
        self._session = None

    async def on_stop(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({})

    async def _list(self, request: web.Request) -> web.Response:
        workers = [
            {"id": url, "url": url, "worker_type": "regular", "is_healthy": url not in self.unhealthy}
            for url in self.worker_urls
        ]
        return web.json_response({"workers": workers, "total": len(workers)})

    async def _add(self, request: web.Request) -> web.Response:
        url = (await request.json())["url"]
        if url not in self.worker_urls:
            self.worker_urls.append(url)
        return web.json_response({"status": "accepted", "worker_id": url}, status=202)

    async def _remove(self, request: web.Request) -> web.Response:
        url = request.match_info["id"]
        self.worker_urls = [other for other in self.worker_urls if other != url]
        return web.json_response({"status": "accepted", "worker_id": url}, status=202)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        if not self.worker_urls:
            return web.json_response({"error": {"code": "no_available_workers"}}, status=503)
        body = await request.read()
        url = self.worker_urls[next(self._turn) % len(self.worker_urls)]
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
            )
        headers = {"Content-Type": "application/json"}
        try:
            async with self._session.post(f"{url}/generate", data=body, headers=headers) as answer:
                return await self._pass_on(request, answer)
        except aiohttp.ClientError as error:
            failure: dict[str, Any] = {"error": {"code": "call_upstream_request_error", "message": str(error)}}
            return web.json_response(failure, status=500)

    async def _pass_on(self, request: web.Request, answer: aiohttp.ClientResponse) -> web.StreamResponse:
        content_type = answer.headers.get("Content-Type", "application/json")
        if "event-stream" not in content_type:
            return web.Response(body=await answer.read(), status=answer.status, headers={"Content-Type": content_type})
        response = web.StreamResponse(status=answer.status, headers={"Content-Type": content_type})
        await response.prepare(request)
        async for piece in answer.content.iter_any():
            await response.write(piece)
        await response.write_eof()
        return response
