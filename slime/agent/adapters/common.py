"""The protocol-independent part of an agent's turn: admit, translate, generate, parse, record, answer.

Subclasses implement a protocol; the base class handles sessions, deadlines and errors.  The application may run in
another thread than the code that opens and finishes sessions (``aiohttp_threaded``).  ``call_sglang_generate`` is
looked up in this module on every turn, so replacing it replaces the engine.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from abc import ABC, abstractmethod
from argparse import Namespace
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from aiohttp import web

from slime.agent.adapters.engine import ask_router, build_prompt_ids, call_sglang_generate, spoken_text
from slime.agent.adapters.messages import (
    EventStream,
    PromptEncoder,
    Reply,
    flatten_content,
    manager_finish_reason,
    read_part,
    sid_from_bearer,
    sid_from_body,
    text_of,
    tool_call_dict,
    translate_content,
    with_named_tools,
)
from slime.agent.adapters.sessions import AdapterError, Session, SessionBook
from slime.agent.trajectory import Message, Pictures, TrajectoryManager, TurnRecord
from slime.rollout.parsing import ParsedModelOutput, check_parsers, opens_reasoning, parse_model_output
from slime.utils.aiohttp_threaded import door
from slime.utils.errors import SlimeError
from slime.utils.files import parse_object
from slime.utils.http_utils import POST_TIMEOUT_S, HttpStatusError
from slime.utils.types import Sample

__all__ = [
    "AdapterError",
    "BaseAdapter",
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

Prompt = tuple[list[Message], list[dict[str, Any]], list[int], list[Pictures]]
"""(messages, tools, ids, pictures)"""
DEFAULT_SID = "default"
"""Session of requests that do not name one."""
MAX_BODY_BYTES = 64 << 20
SMALL_BODY_BYTES = 64 << 10
"""Bodies up to this size are parsed directly; larger ones in a thread, so that other requests need not wait."""
MAX_PROMPT_CHARS = 4_000_000
"""About a million tokens.  Tokenizers take minutes for much longer prompts, and the session would wait."""
PROMPT_TIMEOUT_S = 300.0
KEEP_ALIVE_S = 10.0
"""Longest silence toward a streaming client, so that its read timeout does not expire."""
POLL_S = 0.2
CLIENT_GONE = 499
_ERROR_TYPES = {400: "invalid_request_error", 413: "invalid_request_error", 429: "rate_limit_exceeded"}


class BaseAdapter(ABC):
    """A server in front of SGLang that records the turns of agents.

    Args:
        tool_parser: SGLang's name for the model's tool-call format; None parses the common formats.
        reasoning_parser: SGLang's name for the model's reasoning format; None parses ``<think>`` blocks.
        max_turns_per_sid: Maximum turns of a session; further turns are refused (429).  None: no limit.
        debug_callback: Called for each turn with ``(sid, translated, tools, message, turn)``; its errors are logged.
        generate_timeout_s: Deadline of one turn of the engine, including continuations after aborts.
        processor: Processor of a multimodal model; without it, each image of a request becomes a text placeholder.
        args: The job's arguments; with ``--use-rollout-routing-replay``, turns record the experts of their tokens.
        ask: Returns the engine's answer to ``(payload, session id)``; by default, posts to ``sglang_url``.
    """

    logger: ClassVar[logging.Logger] = logging.getLogger(__name__)
    log_prefix: ClassVar[str] = "adapter"
    max_token_keys: ClassVar[tuple[str, ...]] = ("max_completion_tokens", "max_tokens", "max_output_tokens")
    """Keys of the body that limit the response; the first one present is used."""
    stop_keys: ClassVar[tuple[str, ...]] = ("stop",)

    def __init__(
        self,
        *,
        tokenizer: Any,
        sglang_url: str,
        tool_parser: str | None = None,
        reasoning_parser: str | None = None,
        max_turns_per_sid: int | None = None,
        fork_threshold_tokens: int | None = None,
        debug_callback: Callable[[str, list[Message], list[dict[str, Any]], Message, TurnRecord], Any] | None = None,
        generate_timeout_s: float = POST_TIMEOUT_S,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        processor: Any = None,
        args: Namespace | None = None,
        ask: Callable[[dict[str, Any], str | None], Awaitable[Any]] | None = None,
    ) -> None:
        check_parsers(
            tool_parser, reasoning_parser
        )  # may take seconds: do it here, not in the event loop on the first turn
        self.tokenizer = tokenizer
        self.sglang_url = sglang_url
        self.tool_parser = tool_parser
        self.reasoning_parser = reasoning_parser
        self.debug_callback = debug_callback
        self.generate_timeout_s = generate_timeout_s
        self.chat_template_kwargs = dict(chat_template_kwargs or {})
        self.processor = processor
        self.replays_routes = bool(vars(args or Namespace()).get("use_rollout_routing_replay"))
        self.ask = ask or functools.partial(ask_router, sglang_url)
        self.manager = TrajectoryManager(fork_threshold_tokens=fork_threshold_tokens, args=args)
        self._sessions = SessionBook(max_turns_per_sid)
        self.app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[door()])
        self.app.router.add_get("/healthz", self._healthz)
        self.app.router.add_get("/v1/models", _models)
        self._register_routes(self.app)

    # Sessions, for the code that runs agents.

    def open_session(
        self,
        sid: str,
        *,
        sampling_defaults: Mapping[str, Any] | None = None,
        max_context_tokens: int = 0,
        sampling_overrides: Mapping[str, Any] | None = None,
    ) -> None:
        """Open a session.  Requests without an open session are refused.

        Args:
            sid: Session id, which is also the agent's API key: make it hard to guess.
            sampling_defaults: SGLang sampling parameters that a request may override, except that ``max_new_tokens``
                is an upper limit.
            max_context_tokens: Maximum tokens of prompt and response together; 0: the engine's limit.
            sampling_overrides: Sampling parameters that requests cannot change, such as the training temperature.

        Raises:
            ValueError: a session with this id is already open.
        """
        session = Session(
            sid=sid,
            sampling_defaults=dict(sampling_defaults or {}),
            sampling_overrides=dict(sampling_overrides or {}),
            max_context_tokens=max_context_tokens,
        )
        self._sessions.add(session)

    async def finish_session(
        self,
        sid: str,
        *,
        base_sample: Sample,
        reward: float | dict[str, Any] = 0.0,
        extra_metadata: Mapping[str, Any] | None = None,
        wait_timeout: float = 5.0,
        mask_off_policy: bool = False,
    ) -> list[Sample]:
        """Close the session and return its samples; empty if the session is not open.

        Turns still in flight after ``wait_timeout`` seconds are cancelled and not part of the samples.  For the other
        arguments, see ``TrajectoryManager.get_trajectory``.
        """
        session = await self._sessions.close(sid, wait_timeout)
        if session is None:
            return []
        samples = self.manager.get_trajectory(
            sid,
            base_sample=base_sample,
            reward=reward,
            extra_metadata=extra_metadata,
            max_sample_tokens=session.max_context_tokens,
            mask_off_policy=mask_off_policy,
        )
        for sample in samples:
            response_ids = sample.tokens[len(sample.tokens) - sample.response_length :]
            sample.response = self.tokenizer.decode(response_ids, skip_special_tokens=False)
            sample.metadata["truncated"] = sample.metadata["truncated"] or session.hit_context_limit
        return samples

    async def drop_session(self, sid: str, *, wait_timeout: float = 5.0) -> None:
        await self._sessions.close(sid, wait_timeout)
        self.manager.drop_session(sid)

    async def shutdown_session(self, sid: str, *, wait_timeout: float = 0.0) -> None:
        """Refuse further requests and end those in flight; the session's turns are kept until it is dropped."""
        await self._sessions.shut(sid, wait_timeout)

    def _content(self, content: Any) -> str | list[dict[str, Any]]:
        return translate_content(content, shows_images=self.processor is not None)

    # Implemented by each protocol.

    @abstractmethod
    def _register_routes(self, app: web.Application) -> None:
        """Add the protocol's routes; those that generate call ``_run_turn``."""

    @abstractmethod
    def _session_id(self, request: web.BaseRequest, body: dict[str, Any]) -> str | None:
        """Return the session that a request names."""

    def _preprocess_body(self, body: dict[str, Any]) -> dict[str, Any] | None:
        """Change the body before it is read, in place or by returning another; by default, leave it unchanged."""
        return body

    @abstractmethod
    def _translate(self, body: dict[str, Any]) -> tuple[list[Message], list[dict[str, Any]]]:
        """Return ``(messages, tools)`` as chat templates expect them; raise AdapterError for unsupported features."""

    @abstractmethod
    def _build_reply(
        self, parsed: ParsedModelOutput, raw_finish: str, translated: list[Message], tools: list[dict[str, Any]]
    ) -> Reply:
        """Return the answer in the protocol's format."""

    @abstractmethod
    async def _respond(
        self, request: web.Request, body: dict[str, Any], reply: Reply, in_tok: int, out_tok: int, stream: bool
    ) -> web.StreamResponse:
        """Send the answer."""

    def _error_body(self, status: int, message: str, code: str | None) -> dict[str, Any]:
        """Return an error in the protocol's format; by default OpenAI's."""
        kind = _ERROR_TYPES.get(status, "server_error")
        return {"error": {"message": message, "type": kind, "param": None, "code": code or str(status)}}

    def _event_stream(self) -> EventStream:
        """Return the stream format of keep-alives and errors; by default OpenAI's."""
        return EventStream(named=False)

    # Requests.

    async def _healthz(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "sessions": len(self._sessions)})

    async def _run_turn(self, request: web.Request) -> web.StreamResponse:
        sid = DEFAULT_SID
        try:
            body = await _read_body(request)
            changed = self._preprocess_body(body)
            body = body if changed is None else changed
            sid = self._session_id(request, body) or DEFAULT_SID
            session = self._sessions.admit(sid)
            return await _Turn(self, request, body, session).answer()
        except AdapterError as error:
            self.logger.info("%s: session %s: %d: %s", self.log_prefix, sid, error.status, error)
            return await self._send_error(request, error)
        except Exception as error:
            self.logger.exception("%s: session %s failed.", self.log_prefix, sid)
            return await self._send_error(request, AdapterError(500, f"{type(error).__name__}: {error}"))

    async def _send_error(self, request: web.Request, error: AdapterError) -> web.StreamResponse:
        body = self._error_body(error.status, str(error), error.code)
        if EventStream.of(request) is not None:  # the stream has begun, so its status cannot change
            return await self._event_stream().fail(request, body)
        headers = {} if error.may_retry else {"x-should-retry": "false"}
        return web.json_response(body, status=error.status, headers=headers)


@dataclass
class _Turn:
    """One request of an agent: builds the prompt, generates, records the turn and answers."""

    adapter: BaseAdapter
    request: web.Request
    body: dict[str, Any]
    session: Session

    async def answer(self) -> web.StreamResponse:
        adapter, session = self.adapter, self.session
        task = asyncio.current_task()
        assert task is not None
        session.in_flight.add(task)
        try:
            if session.is_closed:  # closed by another thread after admission, without waiting for this turn
                raise AdapterError(503, f"Session {session.sid!r} was closed.", may_retry=False)
            stream = _wants_stream(self.request, self.body)
            async with session.reading:
                messages, tools, prompt_ids, pictures = await self._prompt_in_time()
            turn = await self._draw(prompt_ids, pictures, stream=stream)
            turn.text = spoken_text(adapter.tokenizer, turn)
            parsed = parse_model_output(
                turn.text,
                tools_schema=tools,
                tool_parser_name=adapter.tool_parser,
                reasoning_parser_name=adapter.reasoning_parser,
                in_reasoning=opens_reasoning(adapter.tokenizer, prompt_ids),
            )
            facts = {"use_tool": bool(parsed.tool_uses), "ill_formed": parsed.ill_formed}
            reply = adapter._build_reply(parsed, turn.finish_reason, messages, tools)
            if _is_gone(self.request):
                raise AdapterError(CLIENT_GONE, "The client closed the connection.")
            adapter.manager.record_turn(
                session.sid,
                turn=turn,
                prompt_messages=messages,
                response_message=reply.manager_message,
                metadata=facts,
                tools=tools,
            )
            self._debug(messages, tools, reply.manager_message, turn)
            sizes = len(prompt_ids), len(turn.output_ids)
            return await adapter._respond(self.request, self.body, reply, *sizes, stream)
        except asyncio.CancelledError:
            if not session.is_closed:
                raise
            raise AdapterError(503, f"Session {session.sid!r} was closed.", may_retry=False) from None
        except ConnectionResetError as error:
            raise AdapterError(CLIENT_GONE, "The client closed the connection.") from error
        finally:
            session.in_flight.discard(task)

    async def _prompt_in_time(self) -> Prompt:
        try:
            return await asyncio.wait_for(asyncio.to_thread(self._prompt), PROMPT_TIMEOUT_S)
        except TimeoutError as error:
            message = (
                f"The chat template or the tokenizer is still running on the prompt after {PROMPT_TIMEOUT_S:g} s."
            )
            remedy = "A loop in chat_template.jinja of --hf-checkpoint may never end."
            raise AdapterError(504, f"{message} {remedy}", may_retry=False) from error

    def _prompt(self) -> Prompt:
        """Return messages, tools, prompt ids and pictures.  Runs in a thread: a tokenizer may take a minute."""
        adapter, sid = self.adapter, self.session.sid
        messages, tools = read_part(lambda: with_named_tools(*adapter._translate(self.body)))
        messages = adapter.manager.with_reasoning(sid, messages, tools)  # the template decides what to show
        known = adapter.manager.known_prefix(sid, messages, tools)
        encode = PromptEncoder(adapter.tokenizer, adapter.processor, known.pictures if known else ())
        num_chars = len(text_of(messages, tools))  # as JSON, like templates write tools and call arguments
        if num_chars > MAX_PROMPT_CHARS:
            message = f"prompt is too long: {num_chars} characters; at most {MAX_PROMPT_CHARS} are tokenized."
            raise AdapterError(400, message, code="context_length_exceeded")
        try:
            kwargs = adapter.chat_template_kwargs
            ids = build_prompt_ids(adapter.tokenizer, messages, tools, known, template_kwargs=kwargs, encode=encode)
        except Exception as error:  # a template may raise anything for messages it does not accept
            message = f"The chat template cannot render the messages: {type(error).__name__}: {error}"
            raise AdapterError(400, message) from error
        return messages, tools, ids, encode.pictures

    async def _draw(self, prompt_ids: list[int], pictures: list[Pictures], *, stream: bool) -> TurnRecord:
        adapter, session = self.adapter, self.session
        shown = {"pictures": pictures} if pictures else {}  # a replaced function may not accept images
        drawing = call_sglang_generate(
            prompt_ids, session, self.body, adapter=adapter, session_id=session.sid, **shown
        )
        call = asyncio.ensure_future(drawing)
        deadline = time.monotonic() + adapter.generate_timeout_s
        spoken_at = time.monotonic()
        try:
            while not call.done():
                await asyncio.wait([call], timeout=POLL_S)
                now = time.monotonic()
                if _is_gone(self.request):
                    raise AdapterError(CLIENT_GONE, "The client closed the connection.")
                if now > deadline:
                    raise AdapterError(504, f"The engine did not answer within {adapter.generate_timeout_s:.0f} s.")
                if stream and now - spoken_at > KEEP_ALIVE_S and not call.done():
                    spoken_at = now
                    await adapter._event_stream().keep_alive(self.request)
            turn = call.result()
        except HttpStatusError as error:
            if error.status == 400 and "context" in error.body:
                session.hit_context_limit = True
                message = f"prompt is too long: {error.body[:500]}"
                raise AdapterError(400, message, code="context_length_exceeded") from error
            # The engine refused this request: a retry would not help.
            raise AdapterError(502, str(error), may_retry=error.status >= 500) from error
        except (SlimeError, TimeoutError) as error:
            late = isinstance(error, TimeoutError) or isinstance(error.__cause__, TimeoutError)
            raise AdapterError(504 if late else 502, str(error) or "The engine did not answer in time.") from error
        finally:
            call.cancel()
        if turn.finish_reason == "abort":
            # Discard the tokens drawn so far: the client may retry.
            raise AdapterError(503, "The engine aborted the turn and did not continue it.")
        return turn

    def _debug(self, *told: Any) -> None:
        adapter = self.adapter
        if adapter.debug_callback is None:
            return
        try:
            adapter.debug_callback(self.session.sid, *told)
        except Exception:
            adapter.logger.exception("%s: debug_callback failed.", adapter.log_prefix)


def _wants_stream(request: web.BaseRequest, body: dict[str, Any]) -> bool:
    wanted = body.get("stream")
    if not isinstance(wanted, bool | None):
        raise AdapterError(400, f"stream is {str(wanted)[:200]!r}; it must be true or false.")
    return "text/event-stream" in request.headers.get("Accept", "") if wanted is None else bool(wanted)


def _is_gone(request: web.BaseRequest) -> bool:
    return request.transport is None or request.transport.is_closing()


async def _models(request: web.Request) -> web.Response:
    model = {"id": "slime", "object": "model", "type": "model", "display_name": "slime", "created": 0}
    model |= {"created_at": "1970-01-01T00:00:00Z", "owned_by": "slime"}
    body = {"object": "list", "data": [model], "has_more": False, "first_id": "slime", "last_id": "slime"}
    return web.json_response(body)


async def _read_body(request: web.Request) -> dict[str, Any]:
    try:
        data = await request.read()
        return parse_object(data) if len(data) <= SMALL_BODY_BYTES else await asyncio.to_thread(parse_object, data)
    except ValueError as error:
        raise AdapterError(400, f"The body is not a JSON object: {error}.") from error
    except web.HTTPRequestEntityTooLarge as error:
        raise AdapterError(413, f"The body is larger than {MAX_BODY_BYTES} bytes.") from error
