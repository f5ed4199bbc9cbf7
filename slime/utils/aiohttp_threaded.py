"""Runs an aiohttp application in a thread with a separate event loop.

An adapter serves hundreds of agents; in a separate thread it neither waits for the rollout's loop nor blocks it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from aiohttp.abc import AbstractAccessLogger

from slime.utils.errors import DeadlineError, ProcessError
from slime.utils.http_door import own_names, refusal, with_address
from slime.utils.http_utils import close_http_client
from slime.utils.net import format_host_port

__all__ = ["AppHandle", "FilteredAccessLogger", "door", "run_app_in_thread"]

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 10.0
KEEPALIVE_S = 30.0
"""Seconds after which a connection without a complete request header is closed; clients drop idle ones earlier."""
_QUIET_PATHS = ("/healthz", "/v1/messages/count_tokens")


def door() -> Any:
    """Return middleware that rejects requests refused by :mod:`slime.utils.http_door`."""
    own = own_names()

    @web.middleware
    async def refuse_strangers(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        at = with_address(own, request.get_extra_info("sockname"))
        refused = refusal(request.method, request.headers.items(), at)
        if refused is None:
            return await handler(request)
        return web.json_response({"error": {"message": refused.reason}}, status=refused.status)

    return refuse_strangers


class FilteredAccessLogger(AbstractAccessLogger):
    """Logs failed requests; successful ones and health checks only at DEBUG level."""

    def log(self, request: web.BaseRequest, response: web.StreamResponse, time: float) -> None:
        went_well = response.status < 400 or request.path in _QUIET_PATHS
        level = logging.DEBUG if went_well else logging.WARNING
        self.logger.log(level, "%s %s: %d in %.2f s", request.method, request.path, response.status, time)


@dataclass
class AppHandle:
    """A running application."""

    host: str
    port: int
    """The port it listens on; chosen by the system if 0 was requested."""
    thread: threading.Thread
    loop: asyncio.AbstractEventLoop
    runner: web.AppRunner
    _finished: asyncio.Event = field(repr=False)

    def stop(self, timeout_sec: float = STOP_TIMEOUT_S) -> None:
        """Stop listening, end open requests and the thread.  Idempotent.

        Raises:
            DeadlineError: the thread did not end in time.
        """
        if not self.loop.is_closed():
            try:
                self.loop.call_soon_threadsafe(self._finished.set)
            except RuntimeError:  # the loop closed in between
                return
        self.thread.join(timeout_sec)
        if self.thread.is_alive():
            where = format_host_port(self.host, self.port)
            raise DeadlineError(f"The server at {where} did not end within {timeout_sec:.0f} s.")


def run_app_in_thread(
    app: web.Application,
    *,
    host: str = "0.0.0.0",
    port: int = 0,
    thread_name: str = "aiohttp-app",
    start_timeout_sec: float = 15.0,
    runner_kwargs: Mapping[str, Any] | None = None,
) -> AppHandle:
    """Serve ``app`` from a daemon thread; returns once it listens.

    Args:
        app: the application; owned by the thread from now on.
        port: 0 lets the system choose.

    Raises:
        DeadlineError: it does not listen within ``start_timeout_sec``.
        ProcessError: it cannot listen; the cause is the server's error.
    """
    started: Future[AppHandle] = Future()

    async def serve() -> None:
        options: dict[str, Any] = {"access_log_class": FilteredAccessLogger, "shutdown_timeout": 1.0}
        options |= {"keepalive_timeout": KEEPALIVE_S, **(runner_kwargs or {})}
        runner = web.AppRunner(app, **options)
        finished = asyncio.Event()
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port, backlog=1024).start()
            started.set_result(
                AppHandle(
                    host=host,
                    port=runner.addresses[0][1],
                    thread=threading.current_thread(),
                    loop=asyncio.get_running_loop(),
                    runner=runner,
                    _finished=finished,
                )
            )
            await finished.wait()
        finally:
            await runner.cleanup()
            await close_http_client()  # connections to engines belong to this loop

    def main() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:  # passed to the waiting thread, or logged
            if started.done():
                logger.exception("The server of thread %s ended.", thread_name)
            else:
                started.set_exception(error)

    threading.Thread(target=main, name=thread_name, daemon=True).start()
    try:
        handle = started.result(start_timeout_sec)
    except (Exception, SystemExit) as error:
        if not started.done():
            raise DeadlineError(
                f"The server at {format_host_port(host, port)} did not listen within {start_timeout_sec:.0f} s."
            ) from None
        where = format_host_port(host, port)
        raise ProcessError(f"The server cannot listen at {where}: {error!r}. Is the port taken?") from error
    logger.info("%s listens at %s", thread_name, format_host_port(host, handle.port))
    return handle
