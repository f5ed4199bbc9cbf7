"""The engines of the service: adapters in them by name, and samples from them."""

from __future__ import annotations

import asyncio
import logging
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slime.backends.sglang_utils.server_control import ServerControl
from slime.backends.sglang_utils.weight_verbs import WeightVerbs
from slime.ext.training_api.backend import (
    BackendError,
    RequestRefused,
    SampledSequence,
    SampleResult,
    SamplingParams,
    StopReason,
)
from slime.flags.security import Trust
from slime.ray.engines.ray_engine import RayEngine
from slime.ray.engines.verbs import EngineList
from slime.ray.waiting import wait_for
from slime.utils.errors import EngineDiedError, EngineError, ProcessError
from slime.utils.http_utils import HttpStatusError, init_http_client, post
from slime.utils.net import http_url

logger = logging.getLogger(__name__)

_REASONS: dict[str, StopReason] = {"stop": "stop", "length": "length"}
LOAD_ATTEMPTS = 3
"""Of a request whose adapter an engine lacks: one that has just started in the place of another."""
ROUTER_ATTEMPTS = 3
"""Signs of life that a router may fail to give, one after the other."""
_MISSING = ("are not loaded", "never been loaded")
"""Parts of SGLang's answers to a request for an adapter that it does not have."""


def load_adapter(engine: WeightVerbs, name: str, folder: str) -> None:
    """Have an engine serve a PEFT folder; runs in the engine's actor."""
    engine.post("/load_lora_adapter", {"lora_name": name, "lora_path": folder})


def unload_adapter(engine: WeightVerbs, name: str) -> None:
    """Have an engine forget an adapter, after the last request that uses it; runs in the engine's actor."""
    engine.post("/unload_lora_adapter", {"lora_name": name})


class EngineSampling:
    """Adapters by name in all engines, which need not be the same engines for long.

    Methods that are not coroutines block, and are called from one thread.

    Args:
        args: of the run.
        manager: the rollout manager, whose engines serve.
        max_length: tokens of a prompt and its continuation.
    """

    def __init__(self, args: Namespace, manager: Any, *, max_length: int) -> None:
        self.args, self._manager, self._max_length = args, manager, max_length
        known: Namespace = wait_for(
            manager.get_args.remote(), what="the routers' addresses", timeout_s=args.weight_update_timeout_s
        )
        init_http_client(known)
        url = http_url(known.sglang_router_ip, known.sglang_router_port)
        self._url = f"{url}/generate"
        self._router = ServerControl(url, api_key=Trust.of(known).job_secret, name="the router")
        self._router_failures = 0
        self._folders: dict[str, Path] = {}
        self._loaded: dict[Any, set[str]] = {}
        """Names in each engine, by its actor."""

    # Adapters

    def load(self, name: str, folder: Path) -> None:
        """Serve the adapter of a PEFT folder under a name.

        Raises:
            EngineError: an engine does not take it; then none keeps it.
        """
        if name in self._folders:
            raise RequestRefused(f"a sampler {name!r} is there already; use another name.")
        self._folders[name] = folder
        try:
            self.complete()
        except ProcessError:
            self.unload(name)
            raise

    def unload(self, name: str) -> None:
        """Serve an adapter no longer."""
        self._folders.pop(name, None)
        engines = [engine for engine in self._engines() if name in self._loaded[engine.handle]]
        pending = [(engine, engine.run(unload_adapter, name)) for engine in engines]
        for engine, one in pending:
            self._loaded[engine.handle].discard(name)
            try:
                one.wait(self.args.weight_update_timeout_s)
            except EngineError as error:  # it has none of it, or is about to be replaced
                logger.warning("Engine %d did not unload %s: %s", engine.index, name, error)

    def complete(self, *, doubted: str | None = None) -> None:
        """Load in every engine what it lacks.

        Args:
            doubted: a name that an engine has said that it lacks.
        """
        pending = []
        for engine in self._engines():
            has = self._loaded[engine.handle]
            if doubted is not None and doubted in has and doubted in self._folders:
                has.discard(doubted)
                engine.run(unload_adapter, doubted)
            pending += [
                (has, name, engine.run(load_adapter, name, str(folder)))
                for name, folder in self._folders.items()
                if name not in has
            ]
        for has, name, one in pending:
            one.wait(self.args.weight_update_timeout_s)
            has.add(name)

    def _engines(self) -> list[RayEngine]:
        asked = self._manager.describe_engines.remote("updatable")
        listed: EngineList = wait_for(asked, what="the engines", timeout_s=self.args.weight_update_timeout_s)
        engines = listed.unpacked()
        self._loaded = {engine.handle: self._loaded.get(engine.handle, set()) for engine in engines}
        return engines

    def check_router(self) -> None:
        """Ask the router for a sign of life.

        Raises:
            EngineDiedError: it has given none several times.
        """
        is_up = self._router.answers("/health", timeout_s=self.args.rollout_health_check_timeout)
        self._router_failures = 0 if is_up else self._router_failures + 1
        if self._router_failures >= ROUTER_ATTEMPTS:
            raise EngineDiedError(f"the router at {self._router.url} does not answer any more")

    # Samples

    async def sample(
        self,
        name: str | None,
        tokens: Sequence[int],
        params: SamplingParams,
        n: int,
        prompt_logprobs: bool,
        topk_prompt_logprobs: int,
    ) -> SampleResult:
        """Draw ``n`` continuations; see ``Backend.sample``.

        Raises:
            EngineError: the engines failed.
            BackendError: an engine aborted the request.
        """
        if name is not None and name not in self._folders:
            raise RequestRefused(f"there is no sampler {name!r}; it was dropped, or never published.")
        asks_prompt = prompt_logprobs or topk_prompt_logprobs > 0
        payloads = []
        for number in range(n):
            payload: dict[str, Any] = {
                "input_ids": list(tokens),
                "sampling_params": self._params(params, len(tokens), number),
                "return_logprob": True,
            }
            if name is not None:
                payload["lora_path"] = name
            if asks_prompt and number == 0:
                payload |= {"logprob_start_len": 0, "top_logprobs_num": topk_prompt_logprobs}
            payloads.append(payload)
        asked = [asyncio.create_task(self._ask(payload)) for payload in payloads]
        try:
            answers = await asyncio.gather(*asked)
        finally:
            for one in asked:
                one.cancel()
        first = answers[0]["meta_info"]
        return SampleResult(
            [_sequence(answer["meta_info"]) for answer in answers],
            prompt_logprobs=[None, *(one[0] for one in first["input_token_logprobs"][1:])]
            if prompt_logprobs
            else None,
            topk_prompt_logprobs=[None, *map(_top, first["input_top_logprobs"][1:])] if topk_prompt_logprobs else None,
        )

    async def _ask(self, payload: dict[str, Any]) -> Any:
        return await post(self._url, payload, max_retries=2, timeout_s=self.args.rollout_timeout_s)

    def _params(self, params: SamplingParams, num_tokens: int, number: int) -> dict[str, Any]:
        room = self._max_length - num_tokens
        if room < 1:
            raise RequestRefused(
                f"the prompt has {num_tokens} tokens; with its continuation it may have {self._max_length}."
            )
        wanted = room if params.max_tokens is None else min(params.max_tokens, room)
        found: dict[str, Any] = {
            **{"max_new_tokens": wanted, "temperature": params.temperature},
            **{"top_p": params.top_p, "top_k": params.top_k},
        }
        if params.seed is not None:
            if not self.args.sglang_enable_deterministic_inference:
                raise RequestRefused(
                    f"sampling_params.seed is {params.seed}, and this server's engines draw without seeds; leave it "
                    "out, or start the server with --sglang-enable-deterministic-inference."
                )
            found["sampling_seed"] = params.seed + number
        if params.stop is not None and not params.stop:
            found["ignore_eos"] = True
        elif params.stop is not None:
            key = "stop" if isinstance(params.stop[0], str) else "stop_token_ids"
            found[key] = list(params.stop)
        return found


def lacks_adapter(error: EngineError) -> bool:
    """Return whether an engine refused a request because it has not its adapter."""
    return isinstance(error, HttpStatusError) and any(part in error.body for part in _MISSING)


def _sequence(info: dict[str, Any]) -> SampledSequence:
    kind = info["finish_reason"]["type"]
    if kind not in _REASONS:
        raise BackendError(f"an engine aborted the request: {str(info['finish_reason'])[:300]}")
    drawn = info["output_token_logprobs"]
    return SampledSequence([one[1] for one in drawn], [one[0] for one in drawn], _REASONS[kind])


def _top(row: Sequence[Any] | None) -> list[tuple[int, float]] | None:
    return None if row is None else [(token, log_prob) for log_prob, token, *_ in row]
