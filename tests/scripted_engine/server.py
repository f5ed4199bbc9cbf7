"""An engine without a model: SGLang's wire format over real HTTP, answers and faults from a ``Script``.

It serves in its own thread, so tests may be plain or async::

    engine = ScriptedEngine(Script(length=8))
    url = engine.start()          # POST {url}/generate ...
    engine.stop()

The engine also answers ``GET /workers`` with itself, so that one server can act as router and engine.
``python -m tests.scripted_engine`` runs one in its own process.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from aiohttp import web

from tests.scripted_engine.script import Fault, Request, Script, split_prompt, text_of

START_TIMEOUT_S = 30.0
PIECE_BYTES = 1 << 16


class ThreadedServer:
    """An aiohttp application in a thread with its own event loop."""

    def __init__(self, *, host: str = "127.0.0.1", port: int = 0) -> None:
        self.host = host
        self.port = port
        self.is_up = False
        self.loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._runner: web.AppRunner | None = None
        self._ready = threading.Event()
        self._finished: asyncio.Event | None = None

    @property
    def url(self) -> str:
        """The URL at which it listens."""
        return f"http://{self.host}:{self.port}"

    def start(self) -> str:
        """Listen; return the URL.  After ``stop`` or ``die`` it listens at the same port again."""
        self._ready.clear()
        self._thread = threading.Thread(target=self._serve, name="scripted-server", daemon=True)
        self._thread.start()
        if not self._ready.wait(START_TIMEOUT_S) or not self.is_up:
            raise RuntimeError(f"the scripted server did not listen at {self.url} within {START_TIMEOUT_S:g} s")
        return self.url

    def stop(self) -> None:
        """Drop every connection and end the thread.  Does nothing if it is not running."""
        if self.loop is not None and self._finished is not None and not self.loop.is_closed():
            try:
                self.loop.call_soon_threadsafe(self.die)
            except RuntimeError:  # it ended by itself in between
                pass
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(START_TIMEOUT_S)

    def die(self) -> None:
        """As if killed: connections are reset, nothing listens.  Call it on the server's own loop."""
        self.is_up = False
        if self._finished is not None:
            self._finished.set()

    def routes(self) -> list[web.RouteDef]:
        """The routes."""
        raise NotImplementedError

    def _serve(self) -> None:
        asyncio.run(self._main())

    async def _main(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._finished = asyncio.Event()
        self.on_start()
        app = web.Application(client_max_size=1 << 30)
        app.add_routes(self.routes())
        self._runner = web.AppRunner(app, shutdown_timeout=0.01, access_log=None, handler_cancellation=True)
        await self._runner.setup()
        try:
            site = web.TCPSite(self._runner, self.host, self.port, reuse_address=True, backlog=4096)
            await site.start()
            self.port = self._runner.addresses[0][1]
            self.is_up = True
        finally:
            self._ready.set()
        await self._finished.wait()
        self.is_up = False
        for handler in list(self._runner.server.connections):  # a killed process closes nothing cleanly
            if handler.transport is not None:
                handler.transport.abort()
        await self._runner.cleanup()
        await self.on_stop()

    def on_start(self) -> None:
        """Prepare what belongs to the event loop."""

    async def on_stop(self) -> None:
        """Release what belongs to the event loop."""

    def __enter__(self) -> Any:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()


class ScriptedEngine(ThreadedServer):
    """One engine.  ``payloads`` has every ``/generate`` body, ``calls`` counts requests by path, over restarts."""

    def __init__(
        self,
        script: Script | None = None,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        record: bool = True,
        cached_bodies: int = 0,
    ) -> None:
        super().__init__(host=host, port=port)
        self._cached_bodies = cached_bodies
        self._bodies: dict[tuple[Any, ...], bytes] = {}
        self.script = script or Script()
        self.weight_version = "default"
        self.worker_type = "regular"
        self.payloads: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.control: list[tuple[str, dict[str, Any]]] = []
        """(path, body) of every other POST."""
        self.calls: Counter[str] = Counter()
        self.max_in_flight = 0
        self.on_request: Callable[[Request], None] | None = None
        """Called on the server's thread when a request has been read."""
        self._record = record
        self._requests = 0
        self._gathered = False
        self._running: dict[str, Request] = {}
        self._go_on: asyncio.Event
        self._all_here: asyncio.Event

    @property
    def in_flight(self) -> int:
        """Requests that run or wait."""
        return len(self._running)

    def on_start(self) -> None:
        self._running = {}
        self._go_on = asyncio.Event()
        self._go_on.set()
        self._all_here = asyncio.Event()

    def routes(self) -> list[web.RouteDef]:
        posts: dict[str, Callable[[dict[str, Any]], Any]] = {
            "/abort_request": self._abort,
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/flush_cache": lambda body: {},
            "/update_weights_from_disk": self._update,
            "/update_weights_from_tensor": self._update,
            "/update_weights_from_distributed": self._update,
            "/update_weight_version": self._update,
            "/init_weights_update_group": lambda body: {"success": True, "message": ""},
            "/destroy_weights_update_group": lambda body: {"success": True, "message": ""},
            "/release_memory_occupation": lambda body: {},
            "/resume_memory_occupation": lambda body: {},
            "/start_profile": lambda body: "Start profiling.",
            "/stop_profile": lambda body: "Stop profiling.",
            "/script": self._rewrite,
        }
        gets: dict[str, Callable[[], Any]] = {
            "/health": lambda: {},
            "/health_generate": lambda: {},
            "/flush_cache": lambda: {},
            "/get_weight_version": lambda: {"weight_version": self.weight_version},
            "/model_info": lambda: {"model_path": "scripted", "weight_version": self.weight_version},
            "/server_info": lambda: {"weight_version": self.weight_version, "disaggregation_mode": "null"},
            "/v1/loads": self._loads,
            "/workers": self._workers,
        }
        routes = [web.post("/generate", self._generate)]
        routes += [web.post(path, self._controlled(path, act)) for path, act in posts.items()]
        routes += [web.get(path, self._asked(path, ask)) for path, ask in gets.items()]
        return routes

    def _controlled(self, path: str, act: Callable[[dict[str, Any]], Any]) -> Any:
        async def handle(request: web.Request) -> web.Response:
            self.calls[path] += 1
            raw = await request.read()
            body = json.loads(raw) if raw else {}
            if self._record:
                self.control.append((path, body))
            return web.json_response(act(body))

        return handle

    def _asked(self, path: str, ask: Callable[[], Any]) -> Any:
        async def handle(request: web.Request) -> web.Response:
            self.calls[path] += 1
            return web.json_response(ask())

        return handle

    # Effects of the control paths.

    def _abort(self, body: dict[str, Any]) -> dict[str, Any]:
        for rid, request in self._running.items():
            if body.get("abort_all") or (body.get("rid") and rid.startswith(body["rid"])):
                request.aborted.set()
        return {}

    def _pause(self, body: dict[str, Any]) -> dict[str, Any]:
        self._go_on.clear()
        if body.get("mode", "abort") == "abort":
            self._abort({"abort_all": True})
        return {"status": "ok"}

    def _continue(self, body: dict[str, Any]) -> dict[str, Any]:
        self._go_on.set()
        return {"status": "ok"}

    def _update(self, body: dict[str, Any]) -> dict[str, Any]:
        version = body.get("weight_version", body.get("new_version"))
        if version is not None:
            self.weight_version = str(version)
        return {"success": True, "message": "scripted"}

    def _rewrite(self, body: dict[str, Any]) -> dict[str, Any]:
        """Not part of SGLang: changes plain fields of the script of an engine in another process."""
        for name, value in body.items():
            setattr(self.script, name, value)
        self._gathered = False
        self._all_here.clear()
        return {"script": repr(self.script)}

    def _loads(self) -> dict[str, Any]:
        return {"loads": [{"dp_rank": 0, "num_running_reqs": self.in_flight, "num_waiting_reqs": 0}]}

    def _workers(self) -> dict[str, Any]:
        worker = {"id": self.url, "url": self.url, "worker_type": self.worker_type, "is_healthy": True}
        return {"workers": [worker], "total": 1}

    # Generation.

    async def _generate(self, web_request: web.Request) -> web.StreamResponse:
        payload = await web_request.json(loads=json.loads)
        number, self._requests = self._requests, self._requests + 1
        self.calls["/generate"] += 1
        if self._record:
            self.payloads.append(payload)
            self.headers.append(dict(web_request.headers))
        request = read_request(payload, number)
        if self.on_request is not None:
            self.on_request(request)
        limit = self.script.max_context
        if limit is not None and len(request.prompt) + request.earlier > limit:
            error = {"error": {"message": f"The input is longer than the model's context length ({limit} tokens)."}}
            return web.json_response(error, status=400)
        if limit is not None and len(request.prompt) + request.earlier + request.limit > limit:
            text = f"Requested token count exceeds the model's maximum context length of {limit} tokens."
            return web.json_response({"error": {"message": text}}, status=400)
        self._running[request.rid] = request
        self.max_in_flight = max(self.max_in_flight, len(self._running))
        try:
            return await self._answer(web_request, request)
        finally:
            self._running.pop(request.rid, None)

    async def _answer(self, web_request: web.Request, request: Request) -> web.StreamResponse:
        fault = self.script.fault_of(request)
        if fault is not None and fault.kind in ("die", "hang", "status", "garbage", "empty"):
            return await self._fail(fault)
        await self._gather()
        await self._go_on.wait()
        if fault is not None and fault.kind == "slow":
            await asyncio.sleep(fault.seconds)
        began = time.time()
        if request.payload.get("stream"):
            return await self._stream(web_request, request, fault)
        count, kind = await self._draw(request)
        body = self._body(request, count, kind, began)
        if fault is not None and fault.kind == "half":
            return await self._send_half(web_request, body, "application/json")
        if len(body) <= PIECE_BYTES:
            return web.Response(body=body, content_type="application/json")
        return await self._send_in_pieces(web_request, body)

    async def _send_in_pieces(self, web_request: web.Request, body: bytes) -> web.StreamResponse:
        """Send a long body as fast as the client reads it, so that thousands of them do not fill our buffers."""
        response = web.StreamResponse()
        response.content_type = "application/json"
        response.content_length = len(body)
        await response.prepare(web_request)
        view = memoryview(body)
        for start in range(0, len(body), PIECE_BYTES):
            await response.write(view[start : start + PIECE_BYTES])
        await response.write_eof()
        return response

    def _body(self, request: Request, count: int, kind: str, began: float) -> bytes:
        """The answer; with ``cached_bodies`` an earlier one to the same request, including its id and times."""
        if not self._cached_bodies:
            return self.render(request, count, kind, began)
        key = (request.prompt, request.earlier, request.seed, request.limit, count, kind)
        body = self._bodies.get(key)
        if body is None:
            body = self.render(request, count, kind, began)
            if len(self._bodies) < self._cached_bodies:
                self._bodies[key] = body
        return body

    async def _gather(self) -> None:
        """Hold the first ``script.gather`` requests until all have arrived."""
        if not self._gathered and self.script.gather:
            if len(self._running) >= self.script.gather:
                self._gathered = True
                self._all_here.set()
            await self._all_here.wait()

    async def _draw(self, request: Request) -> tuple[int, str]:
        """Tokens generated in this call, and why it ended."""
        script = self.script
        wanted = max(script.length_of(request) - request.earlier, 0)
        count, kind = (request.limit, "length") if wanted > request.limit else (wanted, "stop")
        hold = script.hold_of(request)
        if hold is not None and hold < count:
            await request.aborted.wait()
            return hold, "abort"
        if script.seconds_per_token > 0 and count:
            began = time.monotonic()
            try:
                await asyncio.wait_for(request.aborted.wait(), count * script.seconds_per_token)
                return min(count, int((time.monotonic() - began) / script.seconds_per_token)), "abort"
            except TimeoutError:
                pass
        elif request.aborted.is_set():
            return 0, "abort"
        return count, kind

    async def _fail(self, fault: Fault) -> web.StreamResponse:
        if fault.kind == "die":
            self.die()
            await asyncio.Event().wait()
        if fault.kind == "hang":
            await asyncio.Event().wait()
        if fault.kind == "garbage":
            return web.Response(body=b"\x00<html>not what you asked for", content_type="text/html")
        if fault.kind == "empty":
            return web.json_response({"text": ""})
        return web.Response(status=fault.status, text="out of order")

    async def _send_half(self, web_request: web.Request, body: bytes, content_type: str) -> web.StreamResponse:
        """Promise the whole body, send half of it, cut the connection."""
        response = web.StreamResponse()
        response.content_type = content_type
        response.content_length = len(body)
        await response.prepare(web_request)
        await response.write(body[: len(body) // 2])
        assert web_request.transport is not None
        web_request.transport.close()
        return response

    async def _stream(self, web_request: web.Request, request: Request, fault: Fault | None) -> web.StreamResponse:
        """Server-sent events, each with everything so far, as SGLang sends them."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(web_request)
        script, began = self.script, time.time()
        wanted = max(script.length_of(request) - request.earlier, 0)
        count, kind = (request.limit, "length") if wanted > request.limit else (wanted, "stop")
        hold = script.hold_of(request)
        sent = 0
        while sent < count and not request.aborted.is_set():
            if hold is not None and sent >= hold:
                await request.aborted.wait()
                break
            sent = min(sent + script.chunk_tokens, count, count if hold is None else max(hold, 0))
            await asyncio.sleep(script.chunk_tokens * script.seconds_per_token)
            if sent < count:
                await response.write(b"data: " + self.render(request, sent, None, began) + b"\n\n")
            if fault is not None and fault.kind == "half" and 2 * sent >= count:
                assert web_request.transport is not None
                web_request.transport.abort()
                return response
        last = self.render(request, sent, kind if sent >= count else "abort", began)
        await response.write(b"data: " + last + b"\n\ndata: [DONE]\n\n")
        await response.write_eof()
        return response

    def render(self, request: Request, count: int, kind: str | None, began: float) -> bytes:
        """The JSON of an answer with ``count`` new tokens; ``kind`` None while it continues."""
        tokens = self.script.tokens_of(request, request.earlier, request.earlier + count)
        log_probs = self.script.log_probs_of(tokens, request.earlier)
        num_prompt = len(request.prompt) + request.earlier
        reason: dict[str, Any] | None = None
        if kind is not None:
            extra = {"stop": {"matched": 2}, "length": {"length": request.limit}, "abort": {"message": "Aborted"}}
            reason = {"type": kind, **extra[kind]}
        meta: dict[str, Any] = {
            "id": request.rid,
            "finish_reason": reason,
            "prompt_tokens": num_prompt,
            "weight_version": self.weight_version,
            "total_retractions": 0,
            "completion_tokens": count,
            "cached_tokens": request.earlier,
            "e2e_latency": time.time() - began,
            "response_sent_to_client_ts": time.time(),
        }
        if request.payload.get("return_logprob"):
            start = request.payload.get("logprob_start_len", -1)
            if start is not None and start >= 0:
                ids = list(request.prompt) + self.script.tokens_of(request, 0, request.earlier)
                meta["input_token_logprobs"] = [
                    [None if k == 0 else value, token, None]
                    for k, (value, token) in enumerate(zip(self.script.log_probs_of(ids, 0), ids, strict=True))
                ][start:]
            meta["output_token_logprobs"] = [[value, token, None] for value, token in zip(log_probs, tokens)]
        answer = {"text": text_of(tokens), "output_ids": tokens, "meta_info": meta}
        return json.dumps(answer, separators=(",", ":")).encode()


def read_request(payload: dict[str, Any], number: int) -> Request:
    """The parsed body of a ``/generate`` request."""
    input_ids = payload.get("input_ids")
    if input_ids is None:
        input_ids = [ord(character) for character in payload.get("text") or ""]
    prompt, earlier = split_prompt(input_ids)
    params = payload.get("sampling_params") or {}
    limit = params.get("max_new_tokens")
    return Request(
        number=number,
        payload=payload,
        prompt=prompt,
        earlier=earlier,
        seed=params.get("sampling_seed") or 0,
        limit=128 if limit is None else limit,
        rid=payload.get("rid") or f"rid-{number}",
    )
