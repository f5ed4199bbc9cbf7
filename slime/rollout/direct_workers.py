"""Requests that must not pass the router, because it would lose a part of them.

The PyPI sglang-router parses ``/generate`` into its own types and serialises them again; what its types lack is gone.
``ROUTER_KEEPS_*`` is what 0.3.2 hands on, measured field by field (tests/unit/rollout/test_direct_workers.py does it
again with the installed router).  ``return_routed_experts``, ``custom_params`` (top-p replay), ``logit_bias`` and
``stop_regex`` are lost, and change what training sees.  ``spaces_between_special_tokens`` is lost too, but the
decoders of transformers 5 do not read it.

A request with a lost field goes straight to a worker of the router's list, chosen as ``--router-policy`` says; every
other request goes through the router.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import metadata
from typing import Any

from slime.rollout.config import RolloutConfig
from slime.rollout.control_client import list_workers
from slime.utils.errors import EngineError, ProcessError
from slime.utils.http_utils import POST_TIMEOUT_S, RETRIED_STATUSES, HttpStatusError, post
from slime.utils.misc import SingletonMeta
from slime.utils.sglang_meta import decode_generate_answer

logger = logging.getLogger(__name__)

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

POLICIES = ("round_robin", "random", "power_of_two", "consistent_hashing", "manual", "cache_aware")
"""Policies of the router that are followed here; with any other, the least loaded worker is taken."""
PREFIX_TOKENS = 64
"""``cache_aware``: requests that begin with the same so many tokens belong together."""


def lost_fields(payload: dict[str, Any]) -> list[str]:
    """Return the fields of a ``/generate`` payload that the PyPI router loses and that change the answer."""
    lost = [name for name, value in payload.items() if value is not None and name not in ROUTER_KEEPS_FIELDS]
    params = payload.get("sampling_params") or {}
    keeps = ROUTER_KEEPS_SAMPLING_PARAMS | HARMLESS_TO_LOSE
    lost += [f"sampling_params.{name}" for name, value in params.items() if value is not None and name not in keeps]
    return sorted(lost)


@cache
def _router_passes_everything() -> bool:
    """Return True for slime's fork of the router, which hands unknown fields on."""
    try:
        return "slime" in metadata.version("sglang-router")
    except metadata.PackageNotFoundError:
        return False


def router_would_drop(payload: dict[str, Any]) -> bool:
    """Return True when the payload must not pass the installed router."""
    return bool(lost_fields(payload)) and not _router_passes_everything()


class NotForWorkers(EngineError):
    """The workers are of a kind that cannot be asked without the router."""


class WorkerPicker(metaclass=SingletonMeta):
    """Choice of a worker of the router's list.  Invariant: ``in_flight`` counts our own unanswered requests."""

    def __init__(self, config: RolloutConfig) -> None:
        self._list_url = f"{config.router_url}/workers"
        self._policy = config.router_policy or "least_loaded"
        absolute, relative = config.router_balance_abs_threshold, config.router_balance_rel_threshold
        self._abs_threshold = 10 if absolute is None else absolute  # 0 is a threshold too
        self._rel_threshold = 1.2 if relative is None else relative
        self._random = random.Random(config.rollout_seed)
        self._urls: list[str] = []
        self._listed_at = float("-inf")
        self._next = 0
        self.in_flight: Counter[str] = Counter()
        if self._policy not in (*POLICIES, "least_loaded"):
            logger.warning("Requests that bypass the router go to the least loaded worker, not by %s.", self._policy)

    async def urls(self, *, refresh: bool = False) -> list[str]:
        """Return the regular workers; asked again after five seconds."""
        if refresh or time.monotonic() - self._listed_at > _WORKER_LIST_MAX_AGE_S:
            workers = await list_workers(self._list_url)
            special = [w["url"] for w in workers if w.get("worker_type", "regular") != "regular"]
            if special:
                raise NotForWorkers(
                    f"Routing replay and top-p replay need fields that this sglang-router drops, and {special[0]} is "
                    "a prefill or decode worker, which only a router can address. Use regular workers, or a router "
                    "that hands the fields on."
                )
            self._urls = sorted(w["url"] for w in workers if w.get("is_healthy", True))
            self._listed_at = time.monotonic()
        return self._urls

    def choose(self, urls: list[str], routing_key: str | None, payload: dict[str, Any]) -> str:
        """Choose one of ``urls`` by the policy.

        Args:
            urls: the workers that may be asked.
            routing_key: with consistent_hashing and manual, requests of one key go to one worker.
            payload: with cache_aware, equal beginnings of prompts go to one worker while the load allows.
        """
        if self._policy in ("consistent_hashing", "manual") and routing_key:
            return _hashed(urls, routing_key)
        if self._policy == "round_robin":
            self._next += 1
            return urls[self._next % len(urls)]
        if self._policy == "random":
            return self._random.choice(urls)
        if self._policy == "power_of_two" and len(urls) > 1:
            return self._least_loaded(self._random.sample(urls, 2))
        if self._policy == "cache_aware" and (prefix := _prefix(payload)):
            home = _hashed(urls, str(prefix))
            return self._least_loaded(urls) if self._is_overloaded(home, urls) else home
        return self._least_loaded(urls)

    @contextmanager
    def counted(self, url: str) -> Iterator[None]:
        """Count a request to ``url`` while it is in flight."""
        self.in_flight[url] += 1
        try:
            yield
        finally:
            self.in_flight[url] -= 1

    def _least_loaded(self, urls: list[str]) -> str:
        return min(urls, key=lambda url: self.in_flight[url])

    def _is_overloaded(self, home: str, urls: list[str]) -> bool:
        """Apply the router's own rule (``--router-balance-abs-threshold``, ``--router-balance-rel-threshold``)."""
        load, least = self.in_flight[home], min(self.in_flight[url] for url in urls)
        return load - least > self._abs_threshold and load > self._rel_threshold * least


def _hashed(urls: list[str], key: str) -> str:
    """Choose by rendezvous hashing: a worker that goes moves only its own keys."""
    return max(urls, key=lambda url: hashlib.blake2b(f"{key} {url}".encode()).digest())


def _prefix(payload: dict[str, Any]) -> Sequence[int] | str:
    ids = payload.get("input_ids")
    return ids[:PREFIX_TOKENS] if ids else (payload.get("text") or "")[: 4 * PREFIX_TOKENS]


@cache
def _announce(fields: tuple[str, ...]) -> None:
    """Say once for each set of fields that the router is bypassed."""
    logger.warning("Requests with %s go straight to the workers: sglang-router would drop these.", ", ".join(fields))


async def post_to_worker(config: RolloutConfig, payload: dict[str, Any], *, routing_key: str | None) -> Any:
    """Post ``/generate`` to a worker; when that one fails, to another, a bounded number of times.

    Raises:
        EngineError: there is no worker, or every attempt failed.
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
        except ProcessError as error:  # the router may be starting again
            last_error = error
            num_failed += 1
            continue
        # Those that failed are asked again when all have: they may have been replaced at their old address.
        fresh = [url for url in urls if url not in failed] or urls
        if not fresh:
            last_error = EngineError("The router lists no worker.")
            # With fault tolerance one will come, or the run ends.
            num_failed += not config.use_fault_tolerance or time.monotonic() >= deadline_s
            continue
        url = picker.choose(fresh, routing_key, payload)
        try:
            with picker.counted(url):
                return await post(
                    f"{url}/generate", payload, max_retries=_POST_RETRIES_PER_WORKER, decode=decode_generate_answer
                )
        except ProcessError as error:
            if isinstance(error, HttpStatusError) and error.status not in RETRIED_STATUSES:
                raise  # the request is at fault, and would be everywhere
            logger.warning("Worker %s failed (%s); trying another.", url, error)
            failed.append(url)
            last_error = error
            num_failed += 1
    raise EngineError(
        f"No worker answered in {num_failed} attempts (tried {sorted(set(failed)) or 'none'}); last: {last_error}. "
        "Look at the logs of the engines."
    ) from last_error


async def send(config: RolloutConfig, payload: dict[str, Any], session_id: str | None) -> Any:
    """Post through the router, or straight to a worker when the router would lose a field that matters."""
    if router_would_drop(payload):
        return await post_to_worker(config, payload, routing_key=session_id)
    return await post(
        f"{config.router_url}/generate",
        payload,
        config.request_retries,
        headers=config.routing_headers(session_id),
        decode=decode_generate_answer,
    )
