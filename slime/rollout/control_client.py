"""Short requests beside the stream of generation: aborts, loads, worker lists, rewards.

They use separate connections.  In the pool of ``slime.utils.http_utils`` every connection may be held by a
running generation, and an abort that waits for one of these to end would wait for what it is there to stop.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import aiohttp

from slime.rollout.config import RolloutConfig
from slime.utils.errors import ConfigError, EngineError, GraderError, ProcessError
from slime.utils.http_utils import LoopSessions, add_job_servers, job_headers
from slime.utils.redaction import redacted_text

logger = logging.getLogger(__name__)

CONTROL_TIMEOUT_S = 30.0
MAX_WAIT_S = 30.0
"""Between two tries of a server of rewards."""

Answer = TypeVar("Answer")


def control_sessions(*, max_connections: int, timeout_s: float) -> LoopSessions:
    """Return sessions with separate connections.  Proxies of the environment are not used."""

    def make() -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=max_connections),
            timeout=aiohttp.ClientTimeout(total=timeout_s),
            trust_env=False,
        )

    return LoopSessions(make)


class UnusableAnswer(Exception):
    """An answer of a server of rewards is of no use; the next one may be better."""


async def ask_patiently(attempt: Callable[[], Awaitable[Answer]], *, server: str, max_attempts: int) -> Answer:
    """Return what ``attempt`` returns, tried again after 1, 2, 4 ... at most 30 seconds, plus up to a random one.

    Args:
        attempt: sends one request; ``UnusableAnswer`` and errors of the connection are met with another try.
        server: in words, for errors; without credentials.
        max_attempts: at least 1.

    Raises:
        GraderError: the last attempt failed too.
    """
    for number in range(1, max_attempts + 1):
        try:
            return await attempt()
        except (UnusableAnswer, aiohttp.ClientError, TimeoutError, ValueError) as error:
            text = str(error) if isinstance(error, UnusableAnswer) else f"{type(error).__name__}: {error}"
            problem = redacted_text(text)
            if number == max_attempts:
                # A traceback shows the text of the cause too.
                raise GraderError(
                    f"The {server} failed {number} times; last: {problem}. Look at its log, or change --rm-url."
                ) from (error if problem == text else None)
        wait_s = min(2.0 ** (number - 1), MAX_WAIT_S) + random.random()
        logger.warning("The %s failed (%s); asking again in %.1f s", server, problem, wait_s)
        await asyncio.sleep(wait_s)
    raise ConfigError(f"The {server} is to be asked {max_attempts} times; it must be at least once.")


_control = control_sessions(max_connections=0, timeout_s=CONTROL_TIMEOUT_S)


async def control_get(url: str) -> Any:
    """Return the JSON at ``url``.

    Raises:
        EngineError: no answer within ``CONTROL_TIMEOUT_S`` seconds, a status of 400 or more, or no JSON.
    """
    try:
        async with _control.current().get(url, headers=job_headers(url)) as response:
            response.raise_for_status()
            return await response.json(content_type=None)
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise EngineError(f"GET {url} failed: {type(error).__name__}: {error}. Is that server alive?") from error


async def control_post(url: str, payload: Any) -> None:
    """Post JSON and ignore the answer; raise as ``control_get`` does."""
    try:
        async with _control.current().post(url, json=payload, headers=job_headers(url)) as response:
            response.raise_for_status()
    except (aiohttp.ClientError, TimeoutError) as error:
        raise EngineError(f"POST {url} failed: {type(error).__name__}: {error}. Is that server alive?") from error


async def worker_urls(config: RolloutConfig) -> list[str]:
    """Return the engines that the router knows."""
    return [worker["url"] for worker in await list_workers(f"{config.router_url}/workers")]


async def list_workers(list_url: str) -> list[dict[str, Any]]:
    """Return the entries of a router's list; requests to these engines carry the job's secret from then on.

    Raises:
        EngineError: it does not answer, or not with a list of engines.
    """
    answer = await control_get(list_url)
    workers = answer.get("workers", []) if isinstance(answer, dict) else None
    if not isinstance(workers, list):
        raise EngineError(f"GET {list_url} was answered with {str(answer)[:200]!r}; expected the router's engines.")
    add_job_servers(*(worker["url"] for worker in workers))
    return workers


async def abort_engines(config: RolloutConfig) -> None:
    """Ask every engine to end all its requests; one that does not answer is logged and left to its monitor.

    The engines are asked directly, because routers do not pass ``/abort_request`` on; the router only names them.  One
    that does not is being started again: callers repeat the abort until they have what they want.
    """

    async def abort_one(url: str) -> None:
        try:
            await control_post(f"{url}/abort_request", {"abort_all": True})
        except ProcessError as error:
            logger.warning("Engine %s did not take the abort: %s", url, error)

    try:
        urls = await worker_urls(config)
    except ProcessError as error:
        logger.warning("The router does not name the engines to abort: %s", error)
        return
    await asyncio.gather(*map(abort_one, urls))


async def engine_loads(config: RolloutConfig) -> dict[str, int | None]:
    """Return the number of requests that each engine holds; None where it does not say."""

    async def load_of(url: str) -> int | None:
        try:
            return count_requests(await control_get(f"{url}/v1/loads?include=core"))
        except (ProcessError, KeyError, TypeError, ValueError) as error:
            logger.debug("Engine %s does not tell its load: %s", url, error)
            return None

    urls = await worker_urls(config)
    return dict(zip(urls, await asyncio.gather(*(load_of(url) for url in urls)), strict=True))


async def busy_engines(config: RolloutConfig) -> str:
    """Return the engines that hold requests, as ``url (count)`` for an error; empty when none does."""
    try:
        loads = await asyncio.wait_for(engine_loads(config), timeout=10)
    except (ProcessError, TimeoutError) as error:
        return f"unknown, the router did not answer ({error})"
    return ", ".join(f"{url} ({'unknown' if n is None else n})" for url, n in loads.items() if n != 0)


def count_requests(loads: Any) -> int:
    """Count the requests in an answer of ``/v1/loads``: an entry per data-parallel rank, in a list or under ``loads``.

    Raises:
        ValueError: an entry has none of the known counters.
    """
    if isinstance(loads, dict):
        loads = loads["loads"] if "loads" in loads else [loads]
    total = 0
    for entry in loads:
        for name in ("num_reqs", "num_total_reqs", "total_reqs"):
            if name in entry:
                total += entry[name]
                break
        else:
            if "num_running_reqs" not in entry:
                raise ValueError(f"no request count in {entry}")
            total += entry["num_running_reqs"] + entry.get("num_waiting_reqs", 0)
    return total


async def engine_versions(config: RolloutConfig) -> list[str]:
    """Return the weight version of each engine that tells one."""

    async def ask(url: str) -> Any:
        try:
            return (await control_get(f"{url}/model_info")).get("weight_version")
        except (ProcessError, AttributeError) as error:
            logger.debug("Engine %s does not tell its weight version: %s", url, error)
            return None

    try:
        urls = await worker_urls(config)
    except ProcessError as error:
        logger.debug("The engines' weight version is not known: %s", error)
        return []
    return [version for version in await asyncio.gather(*map(ask, urls)) if version is not None]
