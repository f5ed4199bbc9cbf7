"""MCP servers whose tools the policy calls, by the client of the package mcp.

``mcp:COMMAND ARGUMENTS`` starts a program that speaks over its standard input and output; ``mcp:http://HOST/PATH`` is
a server that runs already, over streamable HTTP.  All samples of a process share one session with a server, in one
event loop of all servers: a session outlives the loops that call it.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import json
import shlex
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from slime.ext.mcp.flags import PREFIX
from slime.utils.async_utils import AsyncLoopThread
from slime.utils.errors import ConfigError

if TYPE_CHECKING:
    from mcp import Client

START_LIMIT_S = 120.0
"""For a server to start, or to list its tools; some install themselves first."""
CLOSE_LIMIT_S = 15.0
"""For the client to end its server: it asks, then terminates, then kills."""
MAX_PAGES = 100

_SERVERS: dict[str, Server] = {}


class Session:
    """A connection with a server, and its process where it is a command.  One task opens and closes it."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._leaving = asyncio.Event()
        self.client: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._hold())

    async def _hold(self) -> None:
        try:
            async with AsyncExitStack() as stack:
                async with asyncio.timeout(START_LIMIT_S):
                    self.client.set_result(await stack.enter_async_context(self._new_client()))
                await self._leaving.wait()
        except Exception as error:  # of the client, its transports, or the system: for who asks for the client
            if not self.client.done():
                self.client.set_exception(_cause(error))
                self.client.exception()  # seen: perhaps nobody waits any more
        finally:
            if not self.client.done():  # cancelled while it started
                self.client.set_exception(ConnectionError("the session was closed"))
                self.client.exception()

    def _new_client(self) -> Client:
        from mcp import Client, StdioServerParameters
        from mcp.client.stdio import stdio_client

        if self._where.startswith(("http://", "https://")):
            return Client(self._where)
        log = sys.__stderr__ or sys.stderr
        command, *words = shlex.split(self._where)
        return Client(stdio_client(StdioServerParameters(command=command, args=words), errlog=log))

    @property
    def has_ended(self) -> bool:
        """Whether the connection is closed, or never opened."""
        return self._task.done()

    async def close(self) -> None:
        """End the connection and the process."""
        self._leaving.set()
        await asyncio.wait({self._task}, timeout=CLOSE_LIMIT_S)
        if not self._task.done():  # it still starts, perhaps
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=CLOSE_LIMIT_S)


class Server:
    """A server and this process's session with it: the first call opens it, and the first after a lost one."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._session: Session | None = None

    async def tools(self) -> list[Any]:
        """Return the descriptions of the tools, by a session that ends: the driver asks, and makes no call."""
        session = Session(self._where)
        try:
            client = await session.client
            tools, cursor = [], None
            async with asyncio.timeout(START_LIMIT_S):
                for _ in range(MAX_PAGES):
                    page = await client.list_tools(cursor=cursor)
                    tools += page.tools
                    cursor = page.next_cursor
                    if cursor is None:
                        break
            return tools
        finally:
            await session.close()

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Return what a tool answers; the caller has the deadline.

        Raises:
            RuntimeError: the tool failed; its text is the tool's.
            Exception: the connection was lost, or the server has no such tool.
        """
        from mcp import MCPError
        from mcp.types import INTERNAL_ERROR, INVALID_PARAMS, METHOD_NOT_FOUND

        session = self._session = self._session or Session(self._where)
        try:
            client = await asyncio.shield(session.client)
            answer = await client.call_tool(name, dict(arguments))
        except Exception as error:  # of the client, or of its transports
            if isinstance(error, MCPError):
                is_alive = error.code in (INTERNAL_ERROR, INVALID_PARAMS, METHOD_NOT_FOUND)
            else:  # the client refuses an answer that breaks the tool's schema
                is_alive = isinstance(error, RuntimeError | ValueError) and not session.has_ended
            if not is_alive and self._session is session:
                self._session = None
                await asyncio.shield(session.close())
            raise
        said = "\n".join(getattr(part, "text", f"({part.type})") for part in answer.content)
        if answer.is_error:
            raise RuntimeError(said)
        return said if answer.content else json.dumps(answer.structured_content)

    async def close(self) -> None:
        """End the session, if there is one."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()


def read_tools(path: str) -> Iterator[tuple[dict[str, Any], Callable[..., Awaitable[str]]]]:
    """Yield (description as chat templates take it, coroutine function) for every tool of ``mcp:SERVER``.

    Raises:
        ConfigError: the server does not start, cannot be reached, or has no tool.
    """
    where = path.removeprefix(PREFIX).strip()
    server = _SERVERS.setdefault(where, Server(where))
    try:
        tools = _loop().run(server.tools())
    except Exception as error:  # of the client, its transports, or the system
        raise ConfigError(
            f"--rollout-tools {path}: the server does not list its tools ({type(error).__name__}: {error}). Write "
            "'mcp:COMMAND ARGUMENTS' of a program that speaks MCP over its standard input and output, or "
            "mcp:http://HOST:PORT/mcp."
        ) from error
    if not tools:
        raise ConfigError(f"--rollout-tools {path}: the server has no tools; name another one, or leave it out.")
    for tool in tools:
        function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
        yield {"type": "function", "function": function}, _caller(server, tool.name)


def _caller(server: Server, name: str) -> Callable[..., Awaitable[str]]:
    async def call(**arguments: Any) -> str:
        asked = asyncio.run_coroutine_threadsafe(server.call(name, arguments), _loop().loop)
        return await asyncio.wrap_future(asked)

    return call


def _cause(error: BaseException) -> BaseException:
    """Return the first error of a group; the client's tasks wrap what they raise."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


@functools.cache
def _loop() -> AsyncLoopThread:
    atexit.register(stop_servers)
    return AsyncLoopThread()


def stop_servers() -> None:
    """End every session of this process, and the processes of its servers."""
    while _SERVERS:
        _, server = _SERVERS.popitem()
        _loop().run(server.close())
