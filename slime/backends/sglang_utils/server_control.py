"""Synchronous requests to one SGLang server or the router, each with a deadline and a clear error.

The meaning of the endpoints is in ``sglang_engine``; this module only calls them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import requests

from slime.backends.sglang_utils.child_process import ChildProcess
from slime.utils.errors import DeadlineError, EngineDiedError, EngineError, PortTakenError, ProcessError

CONTROL_TIMEOUT_S = 120.0
"""Deadline of a request that does not transfer weights."""
PROBE_TIMEOUT_S = 30.0
START_POLL_S = 0.1
MAX_BODY_IN_ERROR = 2000


class NoAnswer(EngineError):
    """No answer within the deadline of a request."""


class Refused(EngineError):
    """The server answered with a status that is not a success."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message, status)  # kept as args, which pickling uses
        self.status = status

    def __str__(self) -> str:
        return str(self.args[0])


class ServerControl:
    """The HTTP interface of the server at ``url``."""

    def __init__(self, url: str, *, api_key: str | None = None, name: str | None = None) -> None:
        self.url = url.rstrip("/")
        self.name = name or self.url
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def post(
        self, path: str, payload: Mapping[str, Any] | None = None, *, timeout_s: float = CONTROL_TIMEOUT_S
    ) -> Any:
        """Send a POST request and return the server's JSON (or text).

        Raises:
            EngineError: no answer within ``timeout_s`` seconds, no connection, or a status that is not a success.
        """
        return self.request("POST", path, timeout_s=timeout_s, json=dict(payload or {}))

    def get(self, path: str, *, timeout_s: float = CONTROL_TIMEOUT_S) -> Any:
        return self.request("GET", path, timeout_s=timeout_s)

    def delete(self, path: str, *, timeout_s: float = CONTROL_TIMEOUT_S) -> Any:
        return self.request("DELETE", path, timeout_s=timeout_s)

    def request(self, method: str, path: str, *, timeout_s: float, json: Any = None) -> Any:
        """Send one request without retries: repeating an update or a release would not have the same effect."""
        connect_s = min(PROBE_TIMEOUT_S, timeout_s)
        with requests.Session() as session:
            session.trust_env = False  # engines are reached directly, whatever proxies the environment sets
            try:
                response = session.request(
                    method, self.url + path, json=json, headers=self._headers, timeout=(connect_s, timeout_s)
                )
            except requests.ConnectTimeout as error:
                raise NoAnswer(f"{self.name} took no connection for {method} {path} within {connect_s:g} s") from error
            except requests.Timeout as error:
                raise NoAnswer(f"{self.name} did not answer {method} {path} within {timeout_s:g} s") from error
            except requests.RequestException as error:
                raise EngineError(f"{self.name} cannot be reached for {method} {path}: {error}") from error
        if not response.ok:
            raise Refused(
                f"{self.name} refused {method} {path} with status {response.status_code}: "
                f"{response.text[:MAX_BODY_IN_ERROR]}",
                response.status_code,
            )
        try:
            return response.json()
        except requests.JSONDecodeError:
            return response.text

    def answers(self, path: str = "/health_generate", *, timeout_s: float = PROBE_TIMEOUT_S) -> bool:
        try:
            self.get(path, timeout_s=timeout_s)
        except ProcessError:
            return False
        return True


def wait_until_healthy(
    process: ChildProcess,
    server: ServerControl,
    *,
    timeout_s: float,
    path: str = "/health_generate",
    probe_s: float = PROBE_TIMEOUT_S,
    flag: str = " (--engine-start-timeout-s)",
) -> None:
    """Wait until the process answers ``GET path``: by default, until an engine generates a token.

    Each probe takes at most ``probe_s`` seconds; between probes, check whether the process has ended.  All errors
    include the tail of its log.

    Raises:
        PortTakenError: another process has one of the child's ports.
        EngineDiedError: the child ended for another reason.
        DeadlineError: the child did not answer within ``timeout_s`` seconds.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        is_up = server.answers(path, timeout_s=max(1.0, min(probe_s, deadline - time.monotonic())))
        # The answer may come from another process that took the port.
        if is_up and process.listens_at(urlsplit(server.url).port or 0):
            return
        if end := process.describe_end():
            if process.lost_port():
                raise PortTakenError(f"{end}\nAnother process took a port that was free when it was chosen.")
            raise EngineDiedError(f"{end}\nIt ended before it served; the cause is in its log above.")
        if time.monotonic() > deadline:
            raise DeadlineError(f"{process.name} does not serve after {timeout_s:g} s{flag}\n{process.log_tail()}")
        time.sleep(START_POLL_S)


def flush_cache(server: ServerControl, *, tries: int = 60, wait_s: float = 1.0) -> None:
    """Flush the prefix cache.  A server with requests in flight refuses, so retry.

    Raises:
        EngineError: the server does not answer, or still refuses after ``tries`` tries ``wait_s`` seconds apart.
    """
    for remaining in reversed(range(tries)):
        try:
            server.get("/flush_cache")
            return
        except Refused:
            if not remaining:
                raise
        time.sleep(wait_s)


PROBE_PAYLOAD = {
    "input_ids": [1],
    "sampling_params": {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True},
    "return_logprob": True,
}
"""A request for one token."""


def probe_answer(server: ServerControl, *, timeout_s: float) -> None:
    """Request one token and check the answer.  A timeout is not an error: the queue may be long.

    Raises:
        EngineError: the engine refuses, or its answer is not one token with its log-prob.
    """
    try:
        answer = server.post("/generate", PROBE_PAYLOAD, timeout_s=timeout_s)
    except NoAnswer:
        return
    if not _is_one_token(answer):
        raise EngineError(
            f"{server.name} answered a request for one token with {str(answer)[:500]!r}; expected an object with "
            "meta_info.finish_reason and one [log-prob, token] in meta_info.output_token_logprobs"
        )


def _is_one_token(answer: Any) -> bool:
    meta = answer.get("meta_info") if isinstance(answer, dict) else None
    if not isinstance(meta, dict) or not isinstance(meta.get("finish_reason"), dict):
        return False
    items = meta.get("output_token_logprobs")
    if not isinstance(items, list) or not items:
        return meta["finish_reason"].get("type") == "abort"  # aborted together with other requests
    if not isinstance(items[0], list) or len(items[0]) < 2:
        return False
    log_prob, token = items[0][0], items[0][1]
    return isinstance(log_prob, int | float) and math.isfinite(log_prob) and isinstance(token, int) and token >= 0
