"""Requests to the router and the engines: generation, and short control requests (aborts, loads, worker lists).

Control requests use separate connections.  Running generations may hold every connection of the pool in
``slime.utils.http_utils``, and an abort must not wait for the very requests that it should stop.

Some generation requests must bypass the router.  The PyPI sglang-router parses ``/generate`` into its own types and
serializes them again, which drops every field that its types do not have.  ``ROUTER_KEEPS_*`` lists the fields that
version 0.3.2 forwards, measured field by field; tests/unit/rollout/test_engine_client.py repeats the measurement with
the installed router.  It drops ``return_routed_experts``, ``custom_params`` (top-p replay), ``logit_bias`` and
``stop_regex``, which changes the training data.  It also drops ``spaces_between_special_tokens``, which the decoders
of transformers 5 do not read.

A request with a dropped field goes directly to a worker in the router's list: the worker of its session if
``--router-policy`` keeps sessions together, otherwise the least loaded one.  All other requests go through the router.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import metadata
from typing import Any

import aiohttp

from slime.rollout.config import KEEP_SESSIONS, RolloutConfig
from slime.utils.errors import EngineError, ProcessError
from slime.utils.http_utils import (
    POST_TIMEOUT_S,
    RETRIED_STATUSES,
    HttpStatusError,
    add_job_servers,
    job_headers,
    post,
    separate_sessions,
)
from slime.utils.misc import SingletonMeta
from slime.utils.sglang_meta import decode_generate_answer

logger = logging.getLogger(__name__)

CONTROL_TIMEOUT_S = 30.0
ROUTER_KEEPS_FIELDS = frozenset(
    "rid text input_ids input_embeds image_data video_data audio_data modalities sampling_params return_logprob "
    "logprob_start_len top_logprobs_num token_ids_logprob return_text_in_logprobs return_entropy return_bytes stream "
    "return_hidden_states session_params lora_path lora_id custom_logit_processor bootstrap_host bootstrap_port "
    "bootstrap_room bootstrap_pair_key conversation_id background priority extra_key no_logs log_metrics".split()
)
ROUTER_KEEPS_SAMPLING_PARAMS = frozenset(
    "temperature max_new_tokens top_p top_k min_p min_new_tokens stop stop_token_ids no_stop_trim ignore_eos n "
    "skip_special_tokens frequency_penalty presence_penalty repetition_penalty sampling_seed "
    "json_schema regex ebnf".split()
)
HARMLESS_TO_LOSE = frozenset({"spaces_between_special_tokens"})

_WORKER_LIST_MAX_AGE_S = 5.0
_ATTEMPTS = 10
_POST_RETRIES_PER_WORKER = 3
_RETRY_WAIT_S = 1.0

_control = separate_sessions(max_connections=0, timeout_s=CONTROL_TIMEOUT_S)


async def control_get(url: str) -> Any:
    """Return the JSON at ``url``.

    Raises:
        EngineError: no answer within ``CONTROL_TIMEOUT_S`` seconds, a status >= 400, or a body that is not JSON.
    """
    try:
        async with _control.current().get(url, headers=job_headers(url)) as response:
            response.raise_for_status()
            return await response.json(content_type=None)
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise EngineError(f"GET {url} failed: {type(error).__name__}: {error}. Is that server alive?") from error


async def control_post(url: str, payload: Any) -> None:
    """Post JSON and ignore the response body; errors are those of ``control_get``."""
    try:
        async with _control.current().post(url, json=payload, headers=job_headers(url)) as response:
            response.raise_for_status()
    except (aiohttp.ClientError, TimeoutError) as error:
        raise EngineError(f"POST {url} failed: {type(error).__name__}: {error}. Is that server alive?") from error


async def worker_urls(config: RolloutConfig) -> list[str]:
    """Return the URLs of the engines that the router knows."""
    return [worker["url"] for worker in await list_workers(f"{config.router_url}/workers")]


async def list_workers(list_url: str) -> list[dict[str, Any]]:
    """Return the entries of a router's worker list, and register them as job servers, which get the job's secret.

    Raises:
        EngineError: the router does not answer, or its answer is not a list of engines.
    """
    answer = await control_get(list_url)
    workers = answer.get("workers", []) if isinstance(answer, dict) else None
    if not isinstance(workers, list):
        raise EngineError(f"GET {list_url} was answered with {str(answer)[:200]!r}; expected the router's engines.")
    add_job_servers(*(worker["url"] for worker in workers))
    return workers


async def abort_engines(config: RolloutConfig) -> None:
    """Ask every engine to abort all its requests; engines that do not answer are logged and left to their monitor.

    Routers do not forward ``/abort_request``, so the request goes to each engine directly; the router only lists them.
    A router that does not answer is restarting: callers repeat the abort until nothing is pending.
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
    """Return the number of requests that each engine holds, by URL; None for engines that do not report it."""

    async def load_of(url: str) -> int | None:
        try:
            return count_requests(await control_get(f"{url}/v1/loads?include=core"))
        except (ProcessError, KeyError, TypeError, ValueError) as error:
            logger.debug("Engine %s does not tell its load: %s", url, error)
            return None

    urls = await worker_urls(config)
    return dict(zip(urls, await asyncio.gather(*(load_of(url) for url in urls)), strict=True))


async def busy_engines(config: RolloutConfig) -> str:
    """Return the engines that hold requests as ``url (count), ...`` for an error message; empty if none does."""
    try:
        loads = await asyncio.wait_for(engine_loads(config), timeout=10)
    except (ProcessError, TimeoutError) as error:
        return f"unknown, the router did not answer ({error})"
    return ", ".join(f"{url} ({'unknown' if n is None else n})" for url, n in loads.items() if n != 0)


def count_requests(loads: Any) -> int:
    """Sum the request counts in a response of ``/v1/loads``.

    Args:
        loads: One entry per data-parallel rank, as a list or under the key ``loads``.

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
    """Return the weight version of each engine that reports one."""

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


# Generation


def lost_fields(payload: dict[str, Any]) -> list[str]:
    """Return the fields of a ``/generate`` payload that the PyPI router drops and that change the answer."""
    lost = [name for name, value in payload.items() if value is not None and name not in ROUTER_KEEPS_FIELDS]
    params = payload.get("sampling_params") or {}
    keeps = ROUTER_KEEPS_SAMPLING_PARAMS | HARMLESS_TO_LOSE
    lost += [f"sampling_params.{name}" for name, value in params.items() if value is not None and name not in keeps]
    return sorted(lost)


@cache
def _router_passes_everything() -> bool:
    """Return True for slime's fork of the router, which forwards unknown fields."""
    try:
        return "slime" in metadata.version("sglang-router")
    except metadata.PackageNotFoundError:
        return False


def router_would_drop(payload: dict[str, Any]) -> bool:
    """Return True if the payload must bypass the installed router."""
    return bool(lost_fields(payload)) and not _router_passes_everything()


class NotForWorkers(EngineError):
    """The router lists prefill or decode workers, which cannot be addressed without it."""


class WorkerPicker(metaclass=SingletonMeta):
    """Picks a worker from the router's list.  Invariant: ``in_flight`` counts this process's unanswered requests."""

    def __init__(self, config: RolloutConfig) -> None:
        self._list_url = f"{config.router_url}/workers"
        self._keeps_sessions = config.router_policy in KEEP_SESSIONS
        self._urls: list[str] = []
        self._listed_at = float("-inf")
        self.in_flight: Counter[str] = Counter()

    async def urls(self, *, refresh: bool = False) -> list[str]:
        """Return the healthy regular workers; the list is cached for ``_WORKER_LIST_MAX_AGE_S`` seconds.

        Raises:
            NotForWorkers: the router lists prefill or decode workers.
            EngineError: the router does not answer.
        """
        if refresh or time.monotonic() - self._listed_at > _WORKER_LIST_MAX_AGE_S:
            workers = await list_workers(self._list_url)
            special = [w["url"] for w in workers if w.get("worker_type", "regular") != "regular"]
            if special:
                raise NotForWorkers(
                    f"Routing replay and top-p replay need fields that this sglang-router drops, and {special[0]} is "
                    "a prefill or decode worker, which only a router can address. Use regular workers, or a router "
                    "that forwards these fields."
                )
            self._urls = sorted(w["url"] for w in workers if w.get("is_healthy", True))
            self._listed_at = time.monotonic()
        return self._urls

    def choose(self, urls: list[str], session_id: str | None) -> str:
        """Return the session's worker if the policy keeps sessions together, otherwise the least loaded worker."""
        if self._keeps_sessions and session_id:
            # Rendezvous hashing: a removed worker moves only its own sessions.
            return max(urls, key=lambda url: hashlib.blake2b(f"{session_id} {url}".encode()).digest())
        return min(urls, key=lambda url: self.in_flight[url])

    @contextmanager
    def counted(self, url: str) -> Iterator[None]:
        """Count a request to ``url`` while it is in flight."""
        self.in_flight[url] += 1
        try:
            yield
        finally:
            self.in_flight[url] -= 1


@cache
def _announce(fields: tuple[str, ...]) -> None:
    """Log once for each set of fields that requests bypass the router."""
    logger.warning(
        "Requests with %s go directly to workers: sglang-router would drop these fields.", ", ".join(fields)
    )


async def post_to_worker(config: RolloutConfig, payload: dict[str, Any], *, session_id: str | None) -> Any:
    """Post ``/generate`` to a worker; if it fails, try others a bounded number of times.

    Raises:
        EngineError: the router lists no worker, or every attempt failed.
    """
    _announce(tuple(lost_fields(payload)))
    picker = WorkerPicker(config)
    attempts = max(_ATTEMPTS, config.request_retries) if config.use_fault_tolerance else _ATTEMPTS
    failed: list[str] = []
    last_error: ProcessError | None = None
    num_failed, deadline_s = 0, time.monotonic() + POST_TIMEOUT_S
    while num_failed < attempts:
        if last_error is not None:
            await asyncio.sleep(_RETRY_WAIT_S)
        try:
            urls = await picker.urls(refresh=last_error is not None)
        except NotForWorkers:
            raise
        except ProcessError as error:  # the router may be restarting
            last_error = error
            num_failed += 1
            continue
        # Once all have failed, retry all: a replacement may have started at an old address.
        fresh = [url for url in urls if url not in failed] or urls
        if not fresh:
            last_error = EngineError("The router lists no worker.")
            # With fault tolerance a new worker will appear, or the run will end.
            num_failed += not config.use_fault_tolerance or time.monotonic() >= deadline_s
            continue
        url = picker.choose(fresh, session_id)
        try:
            with picker.counted(url):
                return await post(
                    f"{url}/generate", payload, max_retries=_POST_RETRIES_PER_WORKER, decode=decode_generate_answer
                )
        except ProcessError as error:
            if isinstance(error, HttpStatusError) and error.status not in RETRIED_STATUSES:
                raise  # the request is at fault and would fail on every worker
            logger.warning("Worker %s failed (%s); trying another.", url, error)
            failed.append(url)
            last_error = error
            num_failed += 1
    raise EngineError(
        f"No worker answered in {num_failed} attempts (tried {sorted(set(failed)) or 'none'}); last: {last_error}. "
        "Look at the logs of the engines."
    ) from last_error


async def send(config: RolloutConfig, payload: dict[str, Any], session_id: str | None) -> Any:
    """Post through the router, or directly to a worker if the router would drop a field that matters."""
    if router_would_drop(payload):
        return await post_to_worker(config, payload, session_id=session_id)
    return await post(
        f"{config.router_url}/generate",
        payload,
        config.request_retries,
        headers=config.routing_headers(session_id),
        decode=decode_generate_answer,
    )
