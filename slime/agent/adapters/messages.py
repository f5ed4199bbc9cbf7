"""Parts of requests and answers that both protocols translate alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from aiohttp import web

from slime.agent.adapters.sessions import AdapterError
from slime.agent.trajectory import Message
from slime.utils.json_file import parse_value

Read = TypeVar("Read")


@dataclass
class Reply:
    """One turn's answer."""

    manager_message: Message
    """As the chat template gets it when the conversation goes on."""
    wire: Any = None
    """In the protocol's form: Anthropic's content blocks, OpenAI's message."""
    finish_reason: str = "stop"
    """In the protocol's words."""


def messages_of(body: Mapping[str, Any]) -> list[Any]:
    """Return ``messages`` of a body.  AdapterError when it is no list, or empty."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise AdapterError(400, "The body must have a list 'messages' of at least one message.")
    return messages


def read_part(read: Callable[[], Read]) -> Read:
    """Return what is read from a body.  AdapterError when a part of it is of another kind than the protocol has."""
    try:
        return read()
    except (TypeError, AttributeError, LookupError, ValueError) as error:
        raise AdapterError(400, f"A part of the body is not what the protocol has there: {error}.") from error


def with_named_tools(messages: list[Message], tools: Any) -> tuple[list[Message], Any]:
    """Return both.  TypeError when the name of a tool is no text, which parsers of calls could not find."""
    for tool in tools or ():
        if not isinstance((tool.get("function") or {}).get("name", ""), str):
            raise TypeError(f"a tool is {str(tool)[:200]!r}, whose name is no text")
    return messages, tools


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
            args = parse_value(args or "{}")
        except ValueError:
            pass  # the client wrote it; the template shows it as it is
    call: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": {} if args is None else args}}
    return {"id": call_id, **call} if call_id else call


def manager_finish_reason(tool_uses: Sequence[Any] | None, raw_finish: str) -> str:
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
