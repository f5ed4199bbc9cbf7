"""The adapter for Anthropic's messages API."""

from __future__ import annotations

import json
import logging
import uuid
from typing import Any, ClassVar

from aiohttp import web

from slime.agent.adapters.common import (
    AdapterError,
    BaseAdapter,
    Reply,
    flatten_content,
    manager_finish_reason,
    sid_from_bearer,
    tool_call_dict,
)
from slime.agent.adapters.messages import EventStream, messages_of, pieces
from slime.agent.trajectory import Message
from slime.rollout.parsing import ParsedModelOutput

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERROR_TYPES = {
    400: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class AnthropicAdapter(BaseAdapter):
    """``POST /v1/messages``, streaming or not, for the ``anthropic`` client and Claude Code."""

    logger: ClassVar[logging.Logger] = logging.getLogger(__name__)
    log_prefix: ClassVar[str] = "anthropic"
    stop_keys: ClassVar[tuple[str, ...]] = ("stop_sequences",)

    def _register_routes(self, app: web.Application) -> None:
        app.router.add_post("/v1/messages", self._run_turn)
        app.router.add_post("/v1/messages/count_tokens", self._count_tokens)

    async def _count_tokens(self, request: web.Request) -> web.Response:
        # Agents use this number to decide when to compact their history; 0 leaves that to max_context_tokens.
        return web.json_response({"input_tokens": 0})

    def _session_id(self, request: web.BaseRequest, body: dict[str, Any]) -> str | None:
        return sid_from_bearer(request) or request.headers.get("X-Api-Key") or None

    def _translate(self, body: dict[str, Any]) -> tuple[list[Message], list[dict[str, Any]]]:
        choice = (body.get("tool_choice") or {}).get("type", "auto")
        if choice not in ("auto", "none"):
            raise AdapterError(400, f"tool_choice is {choice!r}; only auto and none are supported.")
        system = [{"role": "system", "content": body["system"]}] if body.get("system") else []
        messages = [one for message in _turns([*system, *messages_of(body)]) for one in self._messages(message)]
        offered = [] if choice == "none" else body.get("tools") or []
        # Tools without input_schema (web search) run on Anthropic's servers, so they are not offered to the policy.
        return messages, [_function_tool(tool) for tool in offered if tool.get("input_schema") is not None]

    def _messages(self, message: dict[str, Any]) -> list[Message]:
        role, blocks = message["role"], message["content"]
        if role == "assistant":
            return [_assistant_message(blocks)]
        results: list[Message] = []
        for block in blocks:
            if block.get("type") == "tool_result":
                content = self._content(block.get("content"))
                results.append({"role": "tool", "content": content, "tool_call_id": block.get("tool_use_id", "")})
        rest = [block for block in blocks if block.get("type") != "tool_result"]
        return [*results, {"role": role, "content": self._content(rest)}] if rest else results

    def _build_reply(
        self, parsed: ParsedModelOutput, raw_finish: str, translated: list[Message], tools: list[dict[str, Any]]
    ) -> Reply:
        blocks: list[dict[str, Any]] = []
        if parsed.reasoning:
            blocks.append({"type": "thinking", "thinking": parsed.reasoning, "signature": ""})
        if parsed.text or not parsed.tool_uses:
            blocks.append({"type": "text", "text": parsed.text})
        for use in parsed.tool_uses:
            blocks.append({"type": "tool_use", "id": f"toolu_{uuid.uuid4().hex[:24]}", **use})
        finish = _STOP_REASONS[manager_finish_reason(parsed.tool_uses, raw_finish)]
        return Reply(_assistant_message(blocks), finish, blocks)

    async def _respond(
        self, request: web.Request, body: dict[str, Any], reply: Reply, in_tok: int, out_tok: int, stream: bool
    ) -> web.StreamResponse:
        message = {
            "id": f"msg_{uuid.uuid4().hex[:24]}",
            "type": "message",
            "role": "assistant",
            "model": body.get("model", "slime"),
            "content": reply.wire,
            "stop_reason": reply.finish_reason,
            "stop_sequence": None,
            "usage": {"input_tokens": in_tok, "output_tokens": out_tok},
        }
        if stream:
            return await self._event_stream().send(request, _events(message))
        return web.json_response(message)

    def _error_body(self, status: int, message: str, code: str | None) -> dict[str, Any]:
        return {"type": "error", "error": {"type": _ERROR_TYPES.get(status, "api_error"), "message": message}}

    def _event_stream(self) -> EventStream:
        return EventStream(named=True, keep_alive={"type": "ping"})


def _blocks(content: Any) -> list[dict[str, Any]]:
    parts = [content] if isinstance(content, str) else content or []
    return [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]


def _turns(messages: list[Any]) -> list[dict[str, Any]]:
    """Return the messages with blocks as content, merging adjacent messages of one role, like Anthropic's server.

    A system message inside the conversation becomes part of the user's turn, in the ``<system-reminder>`` tags that
    Claude Code uses, because most chat templates refuse a system message there.
    """
    turns: list[dict[str, Any]] = []
    for message in messages:
        if not isinstance(message, dict) or message.get("role") not in ("user", "assistant", "system"):
            raise AdapterError(400, f"A message is {str(message)[:200]}; its role must be user or assistant.")
        role, last = message["role"], turns[-1]["role"] if turns else "system"
        blocks = _blocks(message.get("content"))
        if role == "system" != last:
            role, blocks = "user", _blocks(f"<system-reminder>\n{flatten_content(blocks)}\n</system-reminder>")
        if turns and role == last:
            turns[-1]["content"] += blocks
        else:
            turns.append({"role": role, "content": blocks})
    return turns


def _function_tool(tool: dict[str, Any]) -> dict[str, Any]:
    function = {"name": tool.get("name"), "description": tool.get("description", "")}
    return {"type": "function", "function": {**function, "parameters": tool["input_schema"]}}


def _assistant_message(blocks: list[dict[str, Any]]) -> Message:
    text = flatten_content([block for block in blocks if block.get("type") == "text"])
    message: Message = {"role": "assistant", "content": text}
    reasoning = "\n".join(block["thinking"] for block in blocks if block.get("type") == "thinking")
    if reasoning:
        message["reasoning_content"] = reasoning
    uses = [block for block in blocks if block.get("type") == "tool_use"]
    if uses:
        message["tool_calls"] = [tool_call_dict(u.get("name", ""), u.get("input"), u.get("id")) for u in uses]
    return message


def _events(message: dict[str, Any]) -> list[dict[str, Any]]:
    usage = message["usage"]
    opened = {**message, "content": [], "stop_reason": None, "usage": {**usage, "output_tokens": 1}}
    events: list[dict[str, Any]] = [{"type": "message_start", "message": opened}]
    for index, block in enumerate(message["content"]):
        empty, deltas = _block_deltas(block)
        events.append({"type": "content_block_start", "index": index, "content_block": empty})
        events += [{"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas]
        events.append({"type": "content_block_stop", "index": index})
    ended = {"stop_reason": message["stop_reason"], "stop_sequence": None}
    events.append({"type": "message_delta", "delta": ended, "usage": {"output_tokens": usage["output_tokens"]}})
    return [*events, {"type": "message_stop"}]


def _block_deltas(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    if block["type"] == "text":
        return {**block, "text": ""}, [{"type": "text_delta", "text": piece} for piece in pieces(block["text"])]
    if block["type"] == "thinking":
        deltas = [{"type": "thinking_delta", "thinking": piece} for piece in pieces(block["thinking"])]
        return {**block, "thinking": ""}, [*deltas, {"type": "signature_delta", "signature": ""}]
    written = pieces(json.dumps(block["input"], ensure_ascii=False))
    return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": piece} for piece in written]
