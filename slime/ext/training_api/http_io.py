"""Bodies and answers of the service over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pydantic
from aiohttp import web
from tinker import types

from slime.ext.training_api.errors import Refused
from slime.ext.training_api.futures import Promise
from slime.utils.http_utils import encode_json

MAX_BODY_BYTES = 64 << 20
BODY_S = 60.0
"""For a client to send it."""
MAX_PAGE = 1000
OWNER = web.RequestKey("owner", str)

Body = TypeVar("Body", bound=pydantic.BaseModel)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def content_of(request: web.Request, kind: str = "application/json") -> bytes:
    """Return the body of a request.

    Raises:
        Refused: it is of another kind, or does not come.
    """
    if request.content_type != kind:
        raise Refused(f"Content-Type is {request.content_type[:80]!r}; it must be {kind}.", 415)
    try:
        async with asyncio.timeout(BODY_S):
            return await request.read()
    except TimeoutError:
        raise Refused(f"The body was not sent within {BODY_S:.0f} s.", 408) from None


async def body_of(request: web.Request, model: type[Body]) -> Body:
    """Return the message of a request.

    Raises:
        Refused: it is none; names the field.
    """
    try:
        return model.model_validate_json(await content_of(request))
    except pydantic.ValidationError as error:
        what = [f"{'.'.join(map(str, one['loc'])) or 'body'}: {one['msg']}" for one in error.errors()[:5]]
        raise Refused("; ".join(what)) from None


def promised(model: type[Body], ask: Callable[[Body, str], Promise]) -> Handler:
    """Return the handler of a request whose answer comes later."""

    async def handle(request: web.Request) -> web.Response:
        return promise_response(ask(await body_of(request, model), request[OWNER]))

    return handle


def promise_response(promise: Promise) -> web.Response:
    """Return by which id a client may ask for the answer."""
    return json_response(types.UntypedAPIFuture(request_id=promise.request_id))


def json_response(answer: Any, status: int = 200) -> web.Response:
    """Return a message of the protocol, or what JSON has."""
    body = answer.model_dump(mode="json") if isinstance(answer, pydantic.BaseModel) else answer
    return web.Response(body=encode_json(body), status=status, content_type="application/json")


def error_response(status: int, message: str) -> web.Response:
    """Return why a request has no answer."""
    return json_response({"error": message}, status)


def page_of(request: web.Request, entries: list[Any]) -> tuple[list[Any], types.Cursor]:
    """Return the part of a list that a request asks for by ``limit`` and ``offset``.

    Raises:
        Refused: these are no numbers.
    """
    numbers = {}
    for name, default in (("limit", 20), ("offset", 0)):
        text = request.query.get(name, str(default))
        if not (text.isdecimal() and len(text) < 10):
            raise Refused(f"{name} is {text[:80]!r}; it must be a number from 0 on.")
        numbers[name] = int(text)
    offset, limit = numbers["offset"], min(numbers["limit"], MAX_PAGE)
    return entries[offset : offset + limit], types.Cursor(offset=offset, limit=limit, total_count=len(entries))
