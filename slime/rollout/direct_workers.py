"""Requests that must not pass the router, because it would lose a part of them.

The PyPI sglang-router parses ``/generate`` into its own types and serialises them again; what its types lack is gone.
Measured on 0.3.2: of the fields slime sends, ``return_routed_experts`` and ``sampling_params.custom_params`` (routing
and top-p replay) are lost, and both change what training sees.  ``spaces_between_special_tokens`` is lost too, but the
decoders of transformers 5 do not read it.  A request with a lost field goes straight to a worker, chosen here in the
spirit of ``--router-policy``; every other request goes through the router.
"""

from __future__ import annotations

import hashlib
import logging
import time
from argparse import Namespace
from collections import Counter
from functools import cache
from importlib import metadata
from typing import Any

from slime.rollout.control_client import control_get
from slime.utils.errors import EngineError
from slime.utils.http_utils import post
from slime.utils.misc import SingletonMeta
from slime.utils.sglang_meta import decode_generate_answer

logger = logging.getLogger(__name__)

ROUTER_KEEPS_FIELDS = frozenset(
    "rid text input_ids image_data return_logprob logprob_start_len top_logprobs_num stream return_hidden_states "
    "priority sampling_params".split()
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


def lost_fields(payload: dict[str, Any]) -> list[str]:
    """The fields of a ``/generate`` payload that the PyPI router loses and that change the answer."""
    lost = [name for name, value in payload.items() if value is not None and name not in ROUTER_KEEPS_FIELDS]
    params = payload.get("sampling_params") or {}
    keeps = ROUTER_KEEPS_SAMPLING_PARAMS | HARMLESS_TO_LOSE
    lost += [f"sampling_params.{name}" for name, value in params.items() if value is not None and name not in keeps]
    return sorted(lost)


@cache
def _router_passes_everything() -> bool:
    """True for slime's fork of the router, which hands unknown fields on."""
    try:
        return "slime" in metadata.version("sglang-router")
    except metadata.PackageNotFoundError:
        return False


def router_would_drop(payload: dict[str, Any]) -> bool:
    """True when the payload must not pass the installed router."""
    return bool(lost_fields(payload)) and not _router_passes_everything()


class WorkerPicker(metaclass=SingletonMeta):
    """Chooses a worker of the router's list.  Invariant: ``in_flight`` counts our own unanswered requests."""

    def __init__(self, args: Namespace) -> None:
        self._list_url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/workers"
        self._policy = getattr(args, "router_policy", None) or "least_loaded"
        self._urls: list[str] = []
        self._listed_at = float("-inf")
        self._next = 0
        self.in_flight: Counter[str] = Counter()

    async def urls(self, *, refresh: bool = False) -> list[str]:
        """The regular workers; asked again after five seconds."""
        if refresh or time.monotonic() - self._listed_at > _WORKER_LIST_MAX_AGE_S:
            workers = (await control_get(self._list_url)).get("workers", [])
            special = [w["url"] for w in workers if w.get("worker_type", "regular") != "regular"]
            if special:
                raise EngineError(
                    f"Routing replay and top-p replay need fields that this sglang-router drops, and {special[0]} is "
                    "a prefill or decode worker, which only a router can address. Use regular workers, or a router "
                    "that hands the fields on."
                )
            self._urls = sorted(w["url"] for w in workers if w.get("is_healthy", True))
            self._listed_at = time.monotonic()
        return self._urls

    def choose(self, urls: list[str], routing_key: str | None) -> str:
        """One of ``urls`` by the policy: hashed on the key, in turn, or the least loaded."""
        if routing_key and self._policy in ("consistent_hashing", "manual"):
            return max(urls, key=lambda url: hashlib.blake2b(f"{routing_key} {url}".encode()).digest())
        if self._policy == "round_robin":
            self._next += 1
            return urls[self._next % len(urls)]
        return min(urls, key=lambda url: self.in_flight[url])


@cache
def _announce(fields: tuple[str, ...]) -> None:
    """Say once for each set of fields that the router is bypassed."""
    logger.warning("Requests with %s go straight to the workers: sglang-router would drop these.", ", ".join(fields))


async def post_to_worker(args: Namespace, payload: dict[str, Any], *, routing_key: str | None) -> Any:
    """Post ``/generate`` to a worker; when that one fails, to another, a bounded number of times.

    Raises:
        EngineError: there is no worker, or every attempt failed.
    """
    _announce(tuple(lost_fields(payload)))
    picker = WorkerPicker(args)
    failed: list[str] = []
    last_error: EngineError | None = None
    for attempt in range(_ATTEMPTS):
        urls = await picker.urls(refresh=attempt > 0)
        fresh = [url for url in urls if url not in failed] or urls
        if not fresh:
            break
        url = picker.choose(fresh, routing_key)
        picker.in_flight[url] += 1
        try:
            return await post(
                f"{url}/generate", payload, max_retries=_POST_RETRIES_PER_WORKER, decode=decode_generate_answer
            )
        except EngineError as error:
            logger.warning("Worker %s failed (%s); trying another.", url, error)
            failed.append(url)
            last_error = error
        finally:
            picker.in_flight[url] -= 1
    raise EngineError(
        f"No worker answered after {len(failed)} of {_ATTEMPTS} attempts (tried {sorted(set(failed)) or 'none'}). "
        "Look at the logs of the engines."
    ) from last_error
