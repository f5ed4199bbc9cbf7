"""Parts of requests and answers that both protocols share, including images, and server-sent events."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from aiohttp import web

from slime.agent.adapters.sessions import AdapterError
from slime.agent.trajectory import Message, Pictures
from slime.utils.chat_template import call_arguments
from slime.utils.processing_utils import process_text, process_vision_info

Read = TypeVar("Read")
MAX_MESSAGES, MAX_TOOLS = 10_000, 1000


@dataclass
class Reply:
    """The answer of one turn."""

    manager_message: Message
    """The assistant message, as the chat template gets it when the conversation continues."""
    finish_reason: str = "stop"
    """Finish reason in the protocol's terms."""
    wire: Any = None
    """The answer in the protocol's format: Anthropic's content blocks, or OpenAI's message."""

    def __post_init__(self) -> None:
        if not isinstance(self.finish_reason, str):
            raise TypeError(
                f"A Reply has the finish reason {str(self.finish_reason)[:200]!r}; it must be a string. By "
                "position, Reply takes manager_message, finish_reason, wire."
            )


def messages_of(body: Mapping[str, Any]) -> list[Any]:
    """Return ``messages`` of a body; raise AdapterError if it is not a list, empty, or too long."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise AdapterError(400, "The body must have a list 'messages' of at least one message.")
    if len(messages) > MAX_MESSAGES:
        raise AdapterError(400, f"The body has {len(messages)} messages; at most {MAX_MESSAGES} are rendered.")
    return messages


def read_part(read: Callable[[], Read]) -> Read:
    """Call ``read``, which reads a body; raise AdapterError if a part of the body has the wrong type."""
    try:
        return read()
    except (TypeError, AttributeError, LookupError, ValueError) as error:
        raise AdapterError(400, f"A part of the body does not follow the protocol: {error}.") from error


def with_named_tools(messages: list[Message], tools: Any) -> tuple[list[Message], Any]:
    """Return both arguments unchanged; raise TypeError if the name of a tool is not a string.

    Parsers could not find the calls of such a tool.
    """
    if tools and len(tools) > MAX_TOOLS:
        raise AdapterError(400, f"The body has {len(tools)} tools; at most {MAX_TOOLS} are shown.")
    for tool in tools or ():
        if not isinstance((tool.get("function") or {}).get("name", ""), str):
            raise TypeError(f"a tool is {str(tool)[:200]!r}, whose name is not a string")
    return messages, tools


def flatten_content(content: Any) -> str:
    """Return the text of a message's content (a string or a list of parts); non-text parts become placeholders."""
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


def tool_call_dict(name: str, arguments: Any, call_id: str | None = None) -> dict[str, Any]:
    """Return a tool call as chat templates expect it, with ``arguments`` (an object or JSON text) as an object."""
    function = {"name": name, "arguments": call_arguments(arguments)}
    call: dict[str, Any] = {"type": "function", "function": function}
    return {"id": call_id, **call} if call_id else call


def manager_finish_reason(tool_uses: Sequence[Any] | None, raw_finish: str) -> str:
    """Return ``tool_calls`` if the turn called a tool, even if it was cut after the call; else the engine's reason."""
    return "tool_calls" if tool_uses else raw_finish


def sid_from_bearer(request: web.BaseRequest) -> str | None:
    """Return the session named by the header ``Authorization: Bearer``, in which agents send their API key."""
    kind, _, value = request.headers.get("Authorization", "").partition(" ")
    return value.strip() or None if kind.lower() == "bearer" else None


def sid_from_body(body: Mapping[str, Any]) -> str | None:
    """Return the session named by ``metadata.session_id`` or ``user`` of the body."""
    metadata = body.get("metadata")
    found = metadata.get("session_id") if isinstance(metadata, Mapping) else None
    found = found or body.get("user")
    return str(found) if found else None


# Images: from messages of both protocols to prompts of engine and trainer


def translate_content(content: Any, *, shows_images: bool) -> str | list[dict[str, Any]]:
    """Return a message's content as chat templates expect it: text, or a list of parts if there are images.

    Args:
        shows_images: Whether the model accepts images; if not, each image becomes a text placeholder.

    Raises:
        AdapterError: an image is neither inline nor at a web address.
    """
    parts = _parts(content) if shows_images else []
    return parts if any(part["type"] == "image" for part in parts) else flatten_content(content)


def _parts(content: Any) -> list[dict[str, Any]]:
    found = []
    for part in [content] if isinstance(content, str | Mapping) else content or ():
        if not isinstance(part, str) and part.get("type") == "tool_result":
            found += _parts(part.get("content"))
        elif not isinstance(part, str) and part.get("type") in ("image", "image_url"):
            found.append({"type": "image", "image": _source(part)})
        elif text := flatten_content(part):
            found.append({"type": "text", "text": text})
    return found


def _source(part: Mapping[str, Any]) -> str:
    if part["type"] == "image_url":
        holder = part.get("image_url")
        source = holder.get("url") if isinstance(holder, Mapping) else holder
    else:
        holder = part.get("source") or {}
        inline = f"data:{holder.get('media_type', 'image/png')};base64,{holder.get('data')}"
        source = holder.get("url") if holder.get("type") == "url" else inline
    # Refuse paths: they would read files of this machine.
    if not isinstance(source, str) or not source.startswith(("data:", "http://", "https://")):
        raise AdapterError(400, f"An image is {str(source)[:80]!r}; it must be a data: or a web address.")
    return source


def text_of(messages: Sequence[Message], tools: Any) -> str:
    """Return the messages and tools as JSON, without image data."""

    def unseen(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: "" if key == "image" else unseen(item) for key, item in value.items()}
        return [unseen(item) for item in value] if isinstance(value, list) else value

    return json.dumps([unseen(list(messages)), tools], ensure_ascii=False, default=str)


class PromptEncoder:
    """Encodes rendered messages; ``pictures`` holds the images of the last prompt."""

    def __init__(self, tokenizer: Any, processor: Any, known: Sequence[Pictures] = ()) -> None:
        self._tokenizer, self._processor = tokenizer, processor
        self._known = list(known)
        self.pictures: list[Pictures] = []

    def __call__(self, text: str, messages: Sequence[Message], *, continues: bool = False) -> list[int]:
        """Return the ids of ``text``, rendered from ``messages``; ``continues`` means it follows the known prefix."""
        self.pictures = list(self._known) if continues else []
        media = None if self._processor is None else process_vision_info(messages, self._processor)
        if media is None or not media["images"]:
            return list(self._tokenizer.encode(text, add_special_tokens=False))
        ids, train_inputs = process_text(text, media, self._processor)
        self.pictures.append(Pictures(media["images"], train_inputs))
        return ids


# Server-sent events

_STREAM = web.RequestKey("slime_event_stream", web.StreamResponse)


class EventStream:
    """Server-sent events in the format of one protocol.

    Args:
        named: Whether each event has a line with its type (Anthropic) besides its data (OpenAI).
        keep_alive: Event to send while the engine works; None sends a comment, which clients ignore.
    """

    def __init__(self, *, named: bool, keep_alive: dict[str, Any] | None = None) -> None:
        self._named = named
        self._keep_alive = keep_alive

    @staticmethod
    def of(request: web.BaseRequest) -> web.StreamResponse | None:
        """Return the stream of ``request``, or None if it has not begun."""
        return request.get(_STREAM)

    async def begin(self, request: web.BaseRequest) -> web.StreamResponse:
        """Return the stream of ``request``, beginning it if necessary."""
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
        stream = await self.begin(request)
        await stream.write(b"".join(self.encode(event) for event in events) + end)
        await stream.write_eof()
        return stream

    async def fail(self, request: web.BaseRequest, error: dict[str, Any]) -> Any:
        return await self.send(request, [{"type": "error", **error} if self._named else error])

    def encode(self, event: dict[str, Any]) -> bytes:
        head = f"event: {event['type']}\n" if self._named else ""
        return f"{head}data: {json.dumps(event, ensure_ascii=False)}\n\n".encode()


def pieces(text: str, size: int = 512) -> list[str]:
    """Split ``text`` into stream deltas of ``size`` characters."""
    return [text[start : start + size] for start in range(0, len(text), size)]
