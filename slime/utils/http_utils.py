"""HTTP requests to engines, routers and reward servers: a pooled client per event loop, retries, and one clear error.

Transient failures are retried: refused, reset or broken connections, and the statuses in ``RETRIED_STATUSES``.  Any
other status is the caller's mistake and ends the call at once.  With ``--use-fault-tolerance``, a router without
engines does not count as a failure: requests wait until engines are replaced, and the job ends if one cannot be.
Proxies of the environment are not used.
Requests to the job's routers and engines carry the job's secret; requests to any other server never do.
``slime.ray`` may route posts through other processes with ``set_post_transport``.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
import weakref
from argparse import Namespace
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, ClassVar

import aiohttp
import orjson

from slime.utils import env
from slime.utils.errors import EngineError
from slime.utils.misc import decode_json
from slime.utils.net import find_available_port, get_current_node_ip, get_host_info, http_url, is_port_available
from slime.utils.plugins import said_by

__all__ = [
    "HttpStatusError",
    "PostTransportUnavailable",
    "add_job_servers",
    "close_http_client",
    "decode_json",
    "encode_json",
    "find_available_port",
    "get",
    "get_host_info",
    "get_rollout_num_engines",
    "has_secret",
    "init_http_client",
    "is_port_available",
    "job_headers",
    "post",
    "post_for_events",
    "separate_sessions",
    "set_post_transport",
    "waits_for_engines",
]

logger = logging.getLogger(__name__)

POST_TIMEOUT_S = 14400.0
"""Deadline of a post in seconds, including retries; a long response may take hours. The router's limit is the same."""
GET_TIMEOUT_S = 60.0
CONNECT_TIMEOUT_S = 30.0
RETRY_WAIT_S = 1.0
HEADROOM = 64
"""Connections in addition to one per generation, so that other requests need not wait for a generation to end."""
KEEPALIVE_S = 4.0
"""Below the 5 s after which SGLang's server drops idle connections, so that requests rarely hit a closed one."""
READ_BUFFER_BYTES = 1 << 18
"""Size of the pieces in which long answers are read from the socket."""
RETRIED_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504})
NO_ENGINE = ("no_available_workers", "server_selection_failed")
"""Error codes (with status 503) of a router that has no suitable engine for a request."""
RETRIED_ERRORS = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError, asyncio.TimeoutError)

Decoder = Callable[[bytes], Any]
PostTransport = Callable[[str, Any, int, Mapping[str, str] | None], Awaitable[Any]]


class HttpStatusError(EngineError):
    """The server answered with an error status."""

    def __init__(self, method: str, url: str, status: int, body: str) -> None:
        super().__init__(method, url, status, body)  # stored as args for pickling
        self.status = status
        self.body = body

    def __str__(self) -> str:
        method, url, status, body = self.args
        return f"{method} {url} was answered with status {status}: {body[:1000] or '(empty body)'}"


def waits_for_engines(error: Exception) -> bool:
    """Return whether a router has no engine for a request but will get one; then no attempt counts as failed."""
    if not (_CLIENT.replaces_engines and isinstance(error, HttpStatusError)):
        return False
    return error.status == HTTPStatus.SERVICE_UNAVAILABLE and any(code in error.body for code in NO_ENGINE)


class PostTransportUnavailable(EngineError):
    """An installed post transport cannot serve; the request is made from this process instead."""


def _server_of(url: str) -> str:
    return url.partition("://")[2].partition("/")[0]


@dataclass
class _Client:
    """Process-wide state shared by all requests."""

    max_connections: int = 0
    """0 means no limit."""
    replaces_engines: bool = False
    """True if dead engines are replaced (``--use-fault-tolerance``)."""
    transport: PostTransport | None = None
    secret: str | None = field(default_factory=env.job_secret)
    """The job's secret; None if the job has none, or in a process that sends no requests of a job."""
    servers: set[str] = field(default_factory=lambda: {_server_of(url) for url in env.job_servers()})
    """``host:port`` of the servers that get the secret."""


_CLIENT = _Client()


class LoopSessions:
    """One aiohttp session per event loop, created at its first request, because connections belong to their loop."""

    of_process: ClassVar[list[LoopSessions]] = []

    def __init__(self, make: Callable[[], aiohttp.ClientSession]) -> None:
        self.of_process.append(self)
        self._make = make
        self._sessions: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, aiohttp.ClientSession] = (
            weakref.WeakKeyDictionary()
        )

    def current(self) -> aiohttp.ClientSession:
        """Return the session of the running loop."""
        loop = asyncio.get_running_loop()
        session = self._sessions.get(loop)
        if session is None or session.closed:
            session = self._sessions[loop] = self._make()
        return session

    async def close(self) -> None:
        """Close the session of the running loop; the next request opens a new one."""
        session = self._sessions.pop(asyncio.get_running_loop(), None)
        if session is not None:
            await session.close()


def separate_sessions(*, max_connections: int, timeout_s: float) -> LoopSessions:
    """Return sessions with separate connections, not shared with generation.  Ignores the environment's proxies."""

    def make() -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=max_connections),
            timeout=aiohttp.ClientTimeout(total=timeout_s),
            trust_env=False,
        )

    return LoopSessions(make)


def get_rollout_num_engines(args: Namespace) -> int:
    """Return the number of serving engines: ``args.rollout_num_engines``, or as many as fit on the rollout GPUs."""
    known = getattr(args, "rollout_num_engines", None)
    return known or max(1, args.rollout_num_gpus // args.rollout_num_gpus_per_engine)


def init_http_client(args: Namespace) -> None:
    """Configure the client from flags: connection limit (the engines' total concurrency), engine replacement, secret.

    Call before the first request.
    Afterwards, requests to the job's routers carry its secret, and no client in this process, including plug-ins',
    reaches this machine or a router through a proxy.
    """
    _CLIENT.max_connections = args.sglang_server_concurrency * get_rollout_num_engines(args)
    known = vars(args)
    _CLIENT.replaces_engines = bool(known.get("use_fault_tolerance"))
    _CLIENT.secret = known.get("job_secret")
    routers = [*(known.get("sglang_model_routers") or {}).values()]
    routers.append((known.get("sglang_router_ip"), known.get("sglang_router_port")))
    add_job_servers(*(http_url(host, port) for host, port in routers if host and port))
    env.export(env.no_proxy_for(get_current_node_ip(), *(host for host, _ in routers if host)))


def add_job_servers(*urls: str) -> None:
    """Make requests to the servers at ``urls`` carry the job's secret."""
    _CLIENT.servers.update(_server_of(url) for url in urls)


def job_headers(url: str) -> dict[str, str]:
    """Return the headers that a request to ``url`` must carry; empty if the server is not the job's."""
    if _CLIENT.secret is None or _server_of(url) not in _CLIENT.servers:
        return {}
    return {"Authorization": f"Bearer {_CLIENT.secret}"}


def has_secret(authorization: str | None, secret: str) -> bool:
    """Return True if a request's ``Authorization`` header is ``Bearer`` and this secret."""
    return secrets.compare_digest((authorization or "").encode(errors="surrogateescape"), f"Bearer {secret}".encode())


def set_post_transport(transport: PostTransport | None) -> None:
    """Send later posts through ``transport(url, payload, max_retries, headers)``; None sends them from this process.

    A transport that cannot serve raises ``PostTransportUnavailable``; the post is then sent from this process.
    """
    _CLIENT.transport = transport


def _new_session() -> aiohttp.ClientSession:
    limit = _CLIENT.max_connections + HEADROOM if _CLIENT.max_connections else 0
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=limit, keepalive_timeout=KEEPALIVE_S),
        cookie_jar=aiohttp.DummyCookieJar(),
        read_bufsize=READ_BUFFER_BYTES,
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
        trust_env=False,
    )


_SESSIONS = LoopSessions(_new_session)


async def close_http_client() -> None:
    """Close all connections of the running loop; the next request opens new ones."""
    for sessions in LoopSessions.of_process:
        await sessions.close()


async def post(
    url: str,
    payload: Any,
    max_retries: int = 60,
    headers: Mapping[str, str] | None = None,
    *,
    timeout_s: float = POST_TIMEOUT_S,
    decode: Decoder | None = None,
) -> Any:
    """POST ``payload`` as JSON; return the answer decoded from JSON, or as text if it is not JSON.

    Args:
        max_retries: attempts after a first failed one, one second apart; see :func:`waits_for_engines`.
        headers: further headers.
        timeout_s: deadline of the whole call in seconds, including retries.
        decode: decodes the body's bytes in place of ``decode_json``; not used with a post transport.

    Raises:
        EngineError: the deadline passed or the last attempt failed; ``HttpStatusError`` if a server refused.
    """
    headers = {**job_headers(url), **(headers or {})}
    deadline = time.monotonic() + timeout_s
    if _CLIENT.transport is not None:
        try:
            return await asyncio.wait_for(_CLIENT.transport(url, payload, max_retries, headers), timeout_s)
        except PostTransportUnavailable as error:
            logger.warning("Posting from this process: %s", error)
        except TimeoutError as error:
            raise EngineError(
                f"POST {url} through another process (--use-distributed-post) did not end within {timeout_s:.0f} s."
            ) from error
    headers["Content-Type"] = "application/json"
    body = encode_json(payload)
    timeout_s = deadline - time.monotonic()
    return await _request("POST", url, body, headers, max_retries, timeout_s, decode or decode_json)


async def get(
    url: str,
    max_retries: int = 0,
    headers: Mapping[str, str] | None = None,
    *,
    timeout_s: float = GET_TIMEOUT_S,
) -> Any:
    """GET ``url``; return the answer decoded from JSON, or as text if it is not JSON.  See :func:`post`."""
    headers = {**job_headers(url), **(headers or {})}
    return await _request("GET", url, None, headers, max_retries, timeout_s, decode_json)


async def post_for_events(
    url: str, payload: Any, headers: Mapping[str, str] | None = None
) -> AsyncGenerator[bytes, None]:
    """POST ``payload`` as JSON; yield the data of each server-sent event until the server ends the stream.

    There are no retries: the caller keeps what arrived before a failure.

    Raises:
        EngineError: the connection failed or broke, or the deadline of the whole call passed; ``HttpStatusError`` if
            the server refused.
    """
    headers = {**job_headers(url), **(headers or {}), "Content-Type": "application/json"}
    rest = bytearray()
    try:
        async with (
            asyncio.timeout(POST_TIMEOUT_S),
            _SESSIONS.current().request("POST", url, data=encode_json(payload), headers=headers) as response,
        ):
            if response.status >= 400:
                body = await response.read()
                raise HttpStatusError("POST", url, response.status, body.decode(errors="replace"))
            async for piece in response.content.iter_any():
                rest += piece
                if b"\n\n" not in piece and not rest.endswith(b"\n\n"):
                    continue
                *events, tail = bytes(rest).split(b"\n\n")
                rest = bytearray(tail)
                for event in events:
                    if event.startswith(b"data:"):
                        yield event[5:].strip()
    except RETRIED_ERRORS as error:
        raise EngineError(f"POST {url} was cut off: {said_by(error)}. Is the server at that address alive?") from error


def encode_json(payload: Any) -> bytes:
    """Encode ``payload`` as JSON; falls back to the standard encoder for what orjson refuses, such as numeric keys."""
    try:
        return orjson.dumps(payload)
    except TypeError:
        return json.dumps(payload).encode()


async def _request(
    method: str,
    url: str,
    body: bytes | None,
    headers: Mapping[str, str] | None,
    max_retries: int,
    timeout_s: float,
    decode: Decoder,
) -> Any:
    began = time.monotonic()
    attempt = num_failed = 0
    while True:
        attempt += 1
        remaining_s = timeout_s - (time.monotonic() - began)
        try:
            async with (
                asyncio.timeout(max(remaining_s, 0.001)),
                _SESSIONS.current().request(method, url, data=body, headers=headers) as response,
            ):
                answer = await response.read()
                if response.status >= 400:
                    raise HttpStatusError(method, url, response.status, answer.decode(errors="replace"))
            return decode(answer)
        except HttpStatusError as error:
            if error.status not in RETRIED_STATUSES:
                raise
            cause: Exception = error
        except RETRIED_ERRORS as error:
            cause = error
        passed_s = time.monotonic() - began
        num_failed += not waits_for_engines(cause)
        if num_failed > max_retries or passed_s + RETRY_WAIT_S >= timeout_s:
            raise EngineError(
                f"{method} {url} failed {attempt} time(s) in {passed_s:.1f} s (deadline {timeout_s:.0f} s, "
                f"{max_retries} retries); last: {said_by(cause)}. Is the server at that address alive? See its log."
            ) from cause
        if attempt in (1, 10) or attempt % 60 == 0:
            logger.warning("%s %s failed (attempt %d), retrying: %s", method, url, attempt, said_by(cause))
        await asyncio.sleep(RETRY_WAIT_S)
