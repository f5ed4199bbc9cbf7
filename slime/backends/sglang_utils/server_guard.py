"""Access control for an engine's endpoints, which runs before SGLang gets a request.

SGLang's own keys are not sufficient: its ``/load_lora_adapter_from_tensors`` has no admin level, ``/metrics`` is open
to all, a client needs one key for generation and another for administration, and the server reveals its keys in
``/server_info`` and in its log.  Here every endpoint that is not listed below needs the job's secret.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from slime.utils import env
from slime.utils.http_door import AsgiDoor
from slime.utils.net import is_loopback

Asgi = Callable[[Mapping[str, Any], Any, Any], Awaitable[None]]

OPEN = frozenset({"/health", "/ping"})
"""Open to everyone.  Not ``/health_generate``: generating a token while the engine's memory is (being) released
crashes SGLang's scheduler, and a token in flight delays a push."""
GENERATION = frozenset(
    "/generate /health_generate /encode /classify /tokenize /detokenize /invocations /vertex_generate "
    "/v1/completions /v1/chat/completions /v1/embeddings /v1/classify /v1/tokenize /v1/detokenize "
    "/v1/audio/transcriptions /v1/realtime /v1/models /v1/score /v1/rerank /v1/responses /v1/messages "
    "/v1/messages/count_tokens /model_info /get_model_info /weight_version /get_weight_version /server_info "
    "/get_server_info /get_load /v1/loads".split()
)
"""Open to clients of the router too, and without a key if the engine listens on loopback.

Excluded: text parsers, which a single text can block for minutes (``/parse_function_call``, ``/separate_reasoning``);
SGLang's sessions, whose requests engines reject; and Ollama's endpoints, which answer 500 to rejected requests.
"""
GENERATION_FOLDERS = ("/v1/models/", "/v1/responses/")
METRICS = ("/metrics", "/metrics/")
"""Open on loopback.  Not open to clients of the router, which would forward ``/engine_metrics`` for everyone."""
FROM_ENGINES = frozenset({"/encode", "/send", "/scheduler_receive_url"})
"""Endpoints of an encoder that engines call; see :func:`sign_requests`."""


def generation_key(secret: str) -> str:
    """Return the key that the router sends to engines; it allows generation, but no administration."""
    return hmac.new(secret.encode(), b"slime generation", hashlib.sha256).hexdigest()


class ServerGuard:
    """An ASGI application in front of ``app``.

    Args:
        secret: the job's secret, which gives access to everything.
        is_local: the server listens on loopback, where generation and metrics need no key.
        is_encoder: the server is an encoder, which gets requests from other engines.
    """

    def __init__(self, app: Asgi, *, secret: str, is_local: bool, is_encoder: bool = False) -> None:
        self.app = app
        self._door = AsgiDoor(app, needs_json=False)  # audio is sent as forms
        self._secret = secret.encode()
        self._generation_key = generation_key(secret).encode()
        self._is_local = is_local
        self._is_encoder = is_encoder

    async def __call__(self, scope: Mapping[str, Any], receive: Any, send: Any) -> None:
        """Forward the request, or answer 401; endpoints without a key answer 403 to web pages in a browser."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif self.allows(scope["path"], key := _key_of(scope["headers"])):
            await (self.app if key in (self._secret, self._generation_key) else self._door)(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await _refuse(send)

    def allows(self, path: str, key: bytes) -> bool:
        if path in OPEN or secrets.compare_digest(key, self._secret):
            return True
        is_from_engine = self._is_encoder and path in FROM_ENGINES
        if is_from_engine or path in GENERATION or path.startswith(GENERATION_FOLDERS):
            return self._is_local or secrets.compare_digest(key, self._generation_key)
        return self._is_local and path in METRICS


def _key_of(headers: list[tuple[bytes, bytes]]) -> bytes:
    value = next((value for name, value in headers if name == b"authorization"), b"")
    return value[7:] if value[:7].lower() == b"bearer " else b""


async def _refuse(send: Any) -> None:
    text = json.dumps({"error": "This endpoint needs the secret of the job that runs this engine."}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(text)).encode())]
    await send({"type": "http.response.start", "status": 401, "headers": headers})
    await send({"type": "http.response.body", "body": text})


def guard_port(
    secret: str, host: str, port: int, *, is_encoder: bool, encoders: Sequence[str] = (), pass_on: bool = False
) -> None:
    """Guard the application that uvicorn serves on ``port`` in this process.

    Args:
        port: the engine's port; SGLang's other servers are internal and stay unguarded.
        encoders: URLs of encoders, to which this process signs its requests.
        pass_on: make the processes that this one starts do the same (several tokenizer workers share one port).
    """
    import uvicorn

    load = uvicorn.Config.load

    def load_guarded(config: Any) -> None:
        load(config)
        if config.port == port:
            config.loaded_app = ServerGuard(
                config.loaded_app, secret=secret, is_local=is_loopback(host), is_encoder=is_encoder
            )

    uvicorn.Config.load = load_guarded  # type: ignore[method-assign, assignment]
    if encoders:
        sign_requests(secret, encoders)
    if pass_on or encoders:
        env.export_engine_guard([secret, host, port, is_encoder, list(encoders)])


def sign_requests(secret: str, encoders: Sequence[str]) -> None:
    """Send the generation key with this process's requests to encoders, for which SGLang has no flag.

    Args:
        encoders: URLs of the encoders; requests to other hosts, such as for images, carry no key.
    """
    import aiohttp

    request, key = aiohttp.ClientSession._request, f"Bearer {generation_key(secret)}"
    ours = {url.rstrip("/") + path for url in encoders for path in FROM_ENGINES}

    async def signed(session: Any, method: str, url: Any, **options: Any) -> Any:
        if str(url) in ours:
            options["headers"] = {**(options.get("headers") or {}), "Authorization": key}
        return await request(session, method, url, **options)

    aiohttp.ClientSession._request = signed  # type: ignore[method-assign, assignment]


def guard_as_parent() -> None:
    """Guard the port of the process that started this one, and sign requests like it, if it set ``pass_on``."""
    inherited = env.engine_guard()
    if inherited is not None:
        secret, host, port, is_encoder, encoders = inherited
        guard_port(secret, host, port, is_encoder=is_encoder, encoders=encoders)
