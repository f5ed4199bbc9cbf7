"""The adapter for OpenAI's chat completions API."""

from __future__ import annotations

import json
import logging
import time
import uuid
from typing import Any, ClassVar

from aiohttp import web

from slime.agent.adapters.common import (
    AdapterError,
    BaseAdapter,
    Reply,
    manager_finish_reason,
    sid_from_bearer,
    sid_from_body,
    tool_call_dict,
)
from slime.agent.adapters.messages import messages_of, pieces
from slime.agent.trajectory import Message
from slime.rollout.parsing import ParsedModelOutput


class OpenAIAdapter(BaseAdapter):
    """``POST /v1/chat/completions``, streaming or not, for the ``openai`` client and compatible ones."""

    logger: ClassVar[logging.Logger] = logging.getLogger(__name__)
    log_prefix: ClassVar[str] = "openai"

    def _register_routes(self, app: web.Application) -> None:
        app.router.add_post("/v1/chat/completions", self._run_turn)

    def _session_id(self, request: web.BaseRequest, body: dict[str, Any]) -> str | None:
        return sid_from_bearer(request) or sid_from_body(body)

    def _translate(self, body: dict[str, Any]) -> tuple[list[Message], list[dict[str, Any]]]:
        if body.get("n") is not None and (type(body["n"]) is not int or body["n"] != 1):
            raise AdapterError(400, f"n is {body['n']!r}; one answer at a time is supported.")
        wanted = (body.get("response_format") or {}).get("type", "text")
        if wanted != "text":
            raise AdapterError(400, f"response_format is {wanted!r}; only text is supported.")
        choice = body.get("tool_choice")
        if choice not in (None, "auto", "none"):
            raise AdapterError(400, f"tool_choice is {choice!r}; only auto and none are supported.")
        tools = [] if choice == "none" else [tool for tool in body.get("tools") or [] if tool.get("function")]
        return [self._message(message) for message in messages_of(body)], tools

    def _message(self, message: Any) -> Message:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise AdapterError(400, f"A message is {str(message)[:200]}; it must be an object with a role.")
        role = {"developer": "system", "function": "tool"}.get(message["role"], message["role"])
        translated: Message = {"role": role, "content": self._content(message.get("content"))}
        if message.get("tool_calls"):
            calls = [(call.get("function") or {}, call.get("id")) for call in message["tool_calls"]]
            translated["tool_calls"] = [
                tool_call_dict(str(f.get("name", "")), f.get("arguments"), i) for f, i in calls
            ]
        for key in ("tool_call_id", "name", "reasoning_content"):
            if message.get(key):
                translated[key] = message[key]
        return translated

    def _build_reply(
        self, parsed: ParsedModelOutput, raw_finish: str, translated: list[Message], tools: list[dict[str, Any]]
    ) -> Reply:
        ids = [f"call_{uuid.uuid4().hex[:24]}" for _ in parsed.tool_uses]
        message: Message = {"role": "assistant", "content": parsed.text}
        wire: dict[str, Any] = {"role": "assistant", "content": parsed.text or None}
        if parsed.reasoning:
            message["reasoning_content"] = wire["reasoning_content"] = parsed.reasoning
        if parsed.tool_uses:
            uses = list(zip(ids, parsed.tool_uses, strict=True))
            message["tool_calls"] = [tool_call_dict(use["name"], use["input"], call_id) for call_id, use in uses]
            wire["tool_calls"] = [_wire_call(call_id, use) for call_id, use in uses]
        elif wire["content"] is None:
            wire["content"] = ""
        return Reply(message, manager_finish_reason(parsed.tool_uses, raw_finish), wire)

    async def _respond(
        self, request: web.Request, body: dict[str, Any], reply: Reply, in_tok: int, out_tok: int, stream: bool
    ) -> web.StreamResponse:
        usage = {"prompt_tokens": in_tok, "completion_tokens": out_tok, "total_tokens": in_tok + out_tok}
        head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": body.get("model", "slime")}
        if stream:
            options = body.get("stream_options")
            with_usage = isinstance(options, dict) and bool(options.get("include_usage"))
            chunks = _chunks(head, reply, usage if with_usage else None)
            return await self._event_stream().send(request, chunks, end=b"data: [DONE]\n\n")
        choice = {"index": 0, "message": reply.wire, "finish_reason": reply.finish_reason, "logprobs": None}
        return web.json_response({**head, "object": "chat.completion", "choices": [choice], "usage": usage})


def _wire_call(call_id: str, use: dict[str, Any]) -> dict[str, Any]:
    arguments = json.dumps(use["input"], ensure_ascii=False)
    return {"id": call_id, "type": "function", "function": {"name": use["name"], "arguments": arguments}}


def _chunks(head: dict[str, Any], reply: Reply, usage: dict[str, int] | None) -> list[dict[str, Any]]:
    head = {**head, "object": "chat.completion.chunk"}
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    deltas += [{"reasoning_content": piece} for piece in pieces(reply.wire.get("reasoning_content") or "")]
    deltas += [{"content": piece} for piece in pieces(reply.wire.get("content") or "")]
    for index, call in enumerate(reply.wire.get("tool_calls") or []):
        opened = {**call, "index": index, "function": {"name": call["function"]["name"], "arguments": ""}}
        deltas.append({"tool_calls": [opened]})
        for piece in pieces(call["function"]["arguments"]):
            deltas.append({"tool_calls": [{"index": index, "function": {"arguments": piece}}]})
    choices: list[dict[str, Any]] = [
        {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None} for delta in deltas
    ]
    choices.append({"index": 0, "delta": {}, "logprobs": None, "finish_reason": reply.finish_reason})
    chunks = [{**head, "choices": [choice]} for choice in choices]
    return [*chunks, {**head, "choices": [], "usage": usage}] if usage else chunks
