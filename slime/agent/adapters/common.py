"""Shared by both protocols: the call of the engine, small translations, sessions and server-sent events.

``call_sglang_generate`` is looked up here at every turn, so replacing it replaces the engine.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from slime.agent.trajectory import Message, TurnRecord
from slime.utils.errors import EngineError
from slime.utils.http_utils import POST_TIMEOUT_S, post
from slime.utils.sglang_meta import read_output_tokens

__all__ = [
    "AdapterError",
    "Reply",
    "Session",
    "TurnRecord",
    "call_sglang_generate",
    "flatten_content",
    "manager_finish_reason",
    "sid_from_bearer",
    "sid_from_body",
    "tool_call_dict",
]

logger = logging.getLogger(__name__)

DEFAULT_SID = "default"
MAX_RESUMES = 6
"""Continuations of one turn after aborts; each weight update may cause one."""
RESUME_WAIT_S = 1.0
CONNECT_RETRIES = 60
"""One second apart: an engine that is restarted is back by then, and a dead one is reported."""
_FIXED_SAMPLING_PARAMS = {"skip_special_tokens": False, "no_stop_trim": True, "spaces_between_special_tokens": False}


class AdapterError(Exception):
    """A request that gets an error as its answer, in the words of the protocol."""

    def __init__(self, status: int, message: str, *, code: str | None = None, may_retry: bool = True) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        """A finer name of the error, where the protocol has one."""
        self.may_retry = may_retry
        """False tells the official clients not to try the same again."""


@dataclass(kw_only=True)
class Session:
    """One agent's conversation, or its several ones."""

    sid: str
    sampling_defaults: dict[str, Any] = field(default_factory=dict)
    sampling_overrides: dict[str, Any] = field(default_factory=dict)
    max_context_tokens: int = 0
    """Prompt and response of a turn together; 0: the engine's own limit."""
    num_turns: int = 0
    """Turns begun, those in flight included."""
    is_closed: bool = False
    hit_context_limit: bool = False
    in_flight: set[asyncio.Task[Any]] = field(default_factory=set)


@dataclass(kw_only=True)
class Reply:
    """One turn's answer."""

    message: Message
    """As the chat template gets it when the conversation goes on."""
    finish_reason: str
    """In the protocol's words."""
    content: Any = None
    """In the protocol's form: Anthropic's content blocks, OpenAI's message."""


async def call_sglang_generate(
    sglang_url: str,
    input_ids: Sequence[int],
    sampling_params: Mapping[str, Any],
    *,
    session_id: str | None = None,
    tokenizer: Any = None,
    timeout_s: float = POST_TIMEOUT_S,
    max_resumes: int = MAX_RESUMES,
) -> TurnRecord:
    """Generate one turn.

    A turn that is aborted (weights were updated, a rollout ended) continues from the tokens it has; the record says
    which weights drew which tokens.  Cancelling the coroutine closes the connection, on which SGLang ends the request.

    Args:
        sglang_url: of the router or an engine, with or without ``/generate``.
        input_ids: the prompt.
        sampling_params: SGLang's.
        session_id: sent as routing key, so that a session's turns can share an engine's prefix cache.
        tokenizer: decodes the drawn ids; without one the engine's text is taken.
        timeout_s: deadline of the whole turn in seconds.
        max_resumes: continuations after an abort before the turn ends with finish reason ``abort``.

    Raises:
        EngineError: the engine cannot be reached, refuses, or does not answer in time.
    """
    url = f"{sglang_url.rstrip('/').removesuffix('/generate')}/generate"
    headers = {"X-SMG-Routing-Key": session_id} if session_id else {}
    params: dict[str, Any] = {**_FIXED_SAMPLING_PARAMS, **sampling_params}
    began_s = time.monotonic()
    ids: list[int] = []
    log_probs: list[float] = []
    texts: list[str] = []
    spans: list[tuple[str | None, int]] = []
    metas: list[dict[str, Any]] = []
    reason: Mapping[str, Any] = {}
    for attempt in range(max_resumes + 1):
        if attempt:
            await asyncio.sleep(RESUME_WAIT_S)
        left = dict(params)
        if left.get("max_new_tokens") is not None:
            left["max_new_tokens"] -= len(ids)
            if left["max_new_tokens"] <= 0:
                reason = {"type": "length"}
                break
        remaining_s = timeout_s - (time.monotonic() - began_s)
        if remaining_s <= 0:
            raise TimeoutError(f"A turn was aborted {attempt} times and did not end within {timeout_s:.0f} s.")
        payload = {"input_ids": [*input_ids, *ids], "sampling_params": left, "return_logprob": True}
        payload["rid"] = uuid.uuid4().hex
        output = await post(url, payload, CONNECT_RETRIES, headers, timeout_s=remaining_s)
        meta = _meta_of(output)
        new_ids, new_log_probs = read_output_tokens(meta)
        ids += new_ids
        log_probs += new_log_probs
        texts.append(output.get("text") or "")
        version = meta.get("weight_version")
        spans.append((None if version is None else str(version), len(new_ids)))
        metas.append({key: value for key, value in meta.items() if not key.endswith("_logprobs")})
        reason = meta["finish_reason"]
        if reason.get("type") != "abort":
            break
    return TurnRecord(
        prompt_ids=list(input_ids),
        output_ids=ids,
        output_log_probs=log_probs,
        text=_text_of(ids, texts, reason, tokenizer),
        finish_reason=str(reason.get("type")),
        weight_spans=spans,
        meta_infos=metas,
        began_s=began_s,
        ended_s=time.monotonic(),
    )


def _meta_of(output: Any) -> dict[str, Any]:
    meta = output.get("meta_info") if isinstance(output, dict) else None
    if not isinstance(meta, dict) or not isinstance(meta.get("finish_reason"), dict):
        raise EngineError(
            f"The engine answered a turn with {str(output)[:300]!r}; /generate must give an object with 'text' and "
            "'meta_info', whose finish_reason is an object. Look at the log of the engine or the router."
        )
    if "output_token_logprobs" not in meta and meta.get("completion_tokens"):
        raise EngineError("The engine's answer has tokens without log-probs, which cannot be trained on.")
    return meta


def _text_of(ids: list[int], texts: list[str], reason: Mapping[str, Any], tokenizer: Any) -> str:
    """Return the drawn text without its stop token.  An interrupted turn may be split inside a character: decode it
    whole.
    """
    text = "".join(texts)
    if tokenizer is not None and len(texts) > 1:
        text = tokenizer.decode(ids, skip_special_tokens=False)
    matched = reason.get("matched")
    if isinstance(matched, int) and tokenizer is not None:
        matched = tokenizer.decode([matched], skip_special_tokens=False)
    return text.removesuffix(matched) if isinstance(matched, str) and matched else text


def flatten_content(content: Any) -> str:
    """Return the text of a message's content: a string, or a list of parts; a part without text becomes a mark."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Mapping):
        content = [content]
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif part.get("type") == "tool_result":
            texts.append(flatten_content(part.get("content")))
        else:
            texts.append(f"[{part.get('type', 'part')} omitted]")
    return "\n".join(text for text in texts if text)


def tool_call_dict(name: str, args: Any, call_id: str | None = None) -> dict[str, Any]:
    """Return a tool call as chat templates expect it: arguments as an object, also when they come as JSON text."""
    if isinstance(args, str):
        try:
            args = json.loads(args or "{}")
        except json.JSONDecodeError:
            pass  # the client wrote it; the template shows it as it is
    call: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": {} if args is None else args}}
    return {"id": call_id, **call} if call_id else call


def manager_finish_reason(raw_finish: str, tool_uses: Sequence[Any] | None = None) -> str:
    """Return the engine's finish reason, or ``tool_calls`` where the turn ended by itself with a call of a tool."""
    return "tool_calls" if tool_uses and raw_finish == "stop" else raw_finish


def sid_from_bearer(request: web.BaseRequest) -> str | None:
    """Return the session named by the header ``Authorization: Bearer``; agents send their API key there."""
    kind, _, value = request.headers.get("Authorization", "").partition(" ")
    return value.strip() or None if kind.lower() == "bearer" else None


def sid_from_body(body: Mapping[str, Any]) -> str | None:
    """Return the session named by ``metadata.session_id`` or ``user`` of the body."""
    metadata = body.get("metadata")
    found = metadata.get("session_id") if isinstance(metadata, Mapping) else None
    found = found or body.get("user")
    return str(found) if found else None


# Sessions


POLL_S = 0.05
CANCEL_WAIT_S = 5.0
"""For a cancelled request to send its error."""
REMEMBERED_CLOSED = 100_000
"""Closed sessions whose late requests are told apart from those of new sessions."""


class SessionBook:
    """The sessions of one adapter.  Invariant: an id is open, closed or unknown; it never opens twice."""

    def __init__(self, max_turns_per_sid: int | None = None) -> None:
        self.max_turns_per_sid = max_turns_per_sid
        self._open: dict[str, Session] = {}
        self._closed: OrderedDict[str, None] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._open)

    def add(self, session: Session) -> None:
        """Open a session.  ValueError when its id is, or was, in use."""
        with self._lock:
            if session.sid in self._open or session.sid in self._closed:
                raise ValueError(f"Session {session.sid!r} exists already; every session needs an id of its own.")
            self._open[session.sid] = session

    def admit(self, sid: str) -> Session:
        """Count one more turn of the session and return it; an unknown id is opened.

        Raises:
            AdapterError: the session is closed (503) or has used its turns (429).
        """
        with self._lock:
            session = None if sid in self._closed else self._open.setdefault(sid, Session(sid=sid))
            if session is None or session.is_closed:
                raise AdapterError(503, f"Session {sid!r} is closed.", may_retry=False)
            if self.max_turns_per_sid is not None and session.num_turns >= self.max_turns_per_sid:
                message = f"Session {sid!r} has used its {self.max_turns_per_sid} turns."
                raise AdapterError(429, message, code="turn_limit", may_retry=False)
            session.num_turns += 1
            return session

    async def shut(self, sid: str, wait_timeout: float) -> Session | None:
        """Refuse further requests of ``sid``, wait for those in flight, cancel what is left; None: it is not open."""
        session = self._open.get(sid)
        if session is None:
            return None
        session.is_closed = True
        deadline = time.monotonic() + wait_timeout
        while session.in_flight and time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)
        leftover = list(session.in_flight)
        for task in leftover:
            loop = task.get_loop()
            if loop.is_closed():
                session.in_flight.discard(task)
            else:
                loop.call_soon_threadsafe(task.cancel)
        if leftover:
            logger.warning("Session %s was closed with %d turn(s) in flight.", sid, len(leftover))
        give_up = time.monotonic() + CANCEL_WAIT_S
        while session.in_flight and time.monotonic() < give_up:
            await asyncio.sleep(POLL_S)
        return session

    async def close(self, sid: str, wait_timeout: float) -> Session | None:
        """Shut and forget the session; the second caller gets None."""
        with self._lock:
            if sid not in self._open or sid in self._closed:
                return None
            self._closed[sid] = None
            while len(self._closed) > REMEMBERED_CLOSED:
                self._closed.popitem(last=False)
        session = await self.shut(sid, wait_timeout)
        self._open.pop(sid, None)
        return session


# Server-sent events


_STREAM = web.RequestKey("slime_event_stream", web.StreamResponse)


class EventStream:
    """Events of one protocol.

    Args:
        named: each event has a line with its type (Anthropic), not only data (OpenAI).
        keep_alive: an event to send while the engine works; None sends a comment, which clients skip.
    """

    def __init__(self, *, named: bool, keep_alive: dict[str, Any] | None = None) -> None:
        self._named = named
        self._keep_alive = keep_alive

    @staticmethod
    def of(request: web.BaseRequest) -> web.StreamResponse | None:
        """Return the stream of ``request``, when it has begun."""
        return request.get(_STREAM)

    async def begin(self, request: web.BaseRequest) -> web.StreamResponse:
        """Return the stream of ``request``, and begin it when it has not begun."""
        stream = self.of(request)
        if stream is None:
            headers = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
            stream = web.StreamResponse(headers=headers)
            request[_STREAM] = stream
            await stream.prepare(request)
        return stream

    async def keep_alive(self, request: web.BaseRequest) -> None:
        """Tell the client that its request is being worked on."""
        stream = await self.begin(request)
        await stream.write(b": working\n\n" if self._keep_alive is None else self.encode(self._keep_alive))

    async def send(self, request: web.BaseRequest, events: list[dict[str, Any]], *, end: bytes = b"") -> Any:
        """Send ``events`` and end the stream."""
        stream = await self.begin(request)
        await stream.write(b"".join(self.encode(event) for event in events) + end)
        await stream.write_eof()
        return stream

    async def fail(self, request: web.BaseRequest, error: dict[str, Any]) -> Any:
        """End the stream with an error."""
        return await self.send(request, [{"type": "error", **error} if self._named else error])

    def encode(self, event: dict[str, Any]) -> bytes:
        """Return one event as it is sent."""
        head = f"event: {event['type']}\n" if self._named else ""
        return f"{head}data: {json.dumps(event, ensure_ascii=False)}\n\n".encode()


def pieces(text: str, size: int = 512) -> list[str]:
    """Cut ``text`` into deltas of a stream."""
    return [text[start : start + size] for start in range(0, len(text), size)]
