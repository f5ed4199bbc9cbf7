"""Server-sent events."""

from __future__ import annotations

import json
from typing import Any

from aiohttp import web

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
