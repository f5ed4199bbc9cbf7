"""A router and engines in this process, over real HTTP, that answer by a script instead of a model.

Token ids of a prompt are the code points of its text; the response to any prompt is 1000, 1001, 1002 ...  A ``Plan``
for each prompt sets the length, and where the engine stops to wait for an abort.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import threading
from argparse import Namespace
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from slime.rollout import data_source, sglang_rollout
from slime.rollout.engine_client import WorkerPicker
from slime.rollout.sglang_rollout import GenerateState
from slime.utils.types import Sample
from tests.flag_values import args_with

FIRST_RESPONSE_TOKEN = 1000


@dataclass
class Plan:
    """The engine's behavior for one prompt."""

    length: int = 4
    """Response tokens before the end token."""
    hold_after: int | None = None
    """The first call for each sample generates this many tokens, then waits for an abort.  None: never waits."""
    holds: int = 10**6
    """Number of calls that wait; later ones go through."""
    breaks: int = 0
    """Number of calls that the engine itself aborts, after two tokens."""
    wait_in_router: bool = False
    """True if the router forwards the request only after an abort."""
    statuses: list[int] = field(default_factory=list)
    """HTTP statuses of the first calls; later ones succeed."""


class FakeTokenizer:
    """One token per character."""

    is_fast = True
    all_special_tokens: tuple[str, ...] = ()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(character) for character in text]

    def __call__(self, texts: list[str], add_special_tokens: bool = True) -> dict[str, list[list[int]]]:
        return {"input_ids": [self.encode(text) for text in texts]}


class FakeCluster:
    """One router in front of engines.  ``requests`` has every ``/generate`` body in order of arrival."""

    def __init__(self, plans: dict[str, Plan] | None = None, *, num_engines: int = 1) -> None:
        self.plans = defaultdict(Plan, plans or {})
        self.num_engines = num_engines
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.through_router: list[bool] = []
        self.served_by: list[int] = []
        self.num_aborts = 0
        self.max_at_once = 0
        self._at_once = 0
        self.weight_version = "1"
        self.patience_s: float | None = None
        self.worker_types = ["regular"] * num_engines
        self.engine_urls: list[str] = []
        self._in_flight = [0] * num_engines
        self._abort_seen = asyncio.Event()
        self._abort_now = asyncio.Event()
        self._turn = itertools.count()
        self._runners: list[web.AppRunner] = []
        self.port = 0

    async def start(self) -> FakeCluster:
        for index in range(self.num_engines):
            port = await self._serve(
                [
                    web.post("/generate", functools.partial(self._direct, index)),
                    web.post("/abort_request", self._abort),
                    web.get("/v1/loads", functools.partial(self._loads, index)),
                ]
            )
            self.engine_urls.append(f"http://127.0.0.1:{port}")
        self.port = await self._serve([web.post("/generate", self._routed), web.get("/workers", self._workers)])
        return self

    async def stop(self) -> None:
        """End the servers, and the requests that still wait in them."""
        self._abort_seen.set()
        self._abort_now.set()
        await asyncio.sleep(0.01)
        for runner in self._runners:
            await runner.cleanup()

    async def _serve(self, routes: list[web.RouteDef]) -> int:
        app = web.Application()
        app.add_routes(routes)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self._runners.append(runner)
        return site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]

    async def _workers(self, request: web.Request) -> web.Response:
        types = zip(self.engine_urls, self.worker_types, strict=True)
        return web.json_response({"workers": [{"id": url, "url": url, "worker_type": kind} for url, kind in types]})

    async def _loads(self, index: int, request: web.Request) -> web.Response:
        entry = {"dp_rank": 0, "num_running_reqs": self._in_flight[index], "num_waiting_reqs": 0}
        return web.json_response({"loads": [entry]})

    async def _abort(self, request: web.Request) -> web.Response:
        assert (await request.json()) == {"abort_all": True}
        self.num_aborts += 1
        self._abort_seen.set()
        self._abort_now.set()
        self._abort_now = asyncio.Event()
        return web.Response()

    async def _routed(self, request: web.Request) -> web.Response:
        body = await request.json()
        if self.plans[prompt_of(body)].wait_in_router:
            await self._abort_seen.wait()
        return await self._generate(next(self._turn) % self.num_engines, request, through_router=True)

    async def _direct(self, index: int, request: web.Request) -> web.Response:
        return await self._generate(index, request, through_router=False)

    async def _is_aborted(self) -> bool:
        """Wait for the next abort, at most ``patience_s`` if that is set."""
        try:
            await asyncio.wait_for(self._abort_now.wait(), self.patience_s)
            return True
        except TimeoutError:
            return False

    async def _generate(self, index: int, request: web.Request, *, through_router: bool) -> web.Response:
        self._at_once += 1
        self.max_at_once = max(self.max_at_once, self._at_once)
        await asyncio.sleep(0)
        try:
            return await self._answer(index, request, through_router)
        finally:
            self._at_once -= 1

    async def _answer(self, index: int, request: web.Request, through_router: bool) -> web.Response:
        body = await request.json()
        self.requests.append(body)
        self.headers.append(dict(request.headers))
        self.through_router.append(through_router)
        self.served_by.append(index)
        plan = self.plans[prompt_of(body)]
        if plan.statuses:
            return web.Response(status=plan.statuses.pop(0), text="out of order")
        earlier = sum(token >= FIRST_RESPONSE_TOKEN for token in body["input_ids"])
        wanted = min(plan.length - earlier, body["sampling_params"]["max_new_tokens"])
        kind = "stop" if wanted == plan.length - earlier else "length"
        version = self.weight_version
        if plan.breaks > 0:
            plan.breaks -= 1
            wanted, kind = min(wanted, 2), "abort"
        elif plan.hold_after is not None and plan.holds > 0:
            plan.holds -= 1
            self._in_flight[index] += 1
            if await self._is_aborted():
                wanted, kind = min(wanted, plan.hold_after), "abort"
            self._in_flight[index] -= 1
        new = [FIRST_RESPONSE_TOKEN + earlier + k for k in range(wanted)]
        return web.json_response(
            {
                "text": "".join(f"<{token}>" for token in new),
                "meta_info": {
                    "finish_reason": {"type": kind},
                    "output_token_logprobs": [[-0.5, token, None] for token in new],
                    "weight_version": version,
                    "prompt_tokens": len(body["input_ids"]),
                    "completion_tokens": len(new),
                    "cached_tokens": 0,
                },
            }
        )


def clear_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new process: no state of an earlier rollout, and the fake tokenizer for every model."""
    for module in (sglang_rollout, data_source):
        monkeypatch.setattr(module, "load_tokenizer", lambda *_, **__: FakeTokenizer())
        monkeypatch.setattr(module, "load_processor", lambda *_, **__: None)
    CALLS.clear()
    GenerateState.clear_instances()
    WorkerPicker.clear_instances()


def prompt_of(body: dict[str, Any]) -> str:
    """The prompt's text, from the ids of a request."""
    return "".join(chr(token) for token in body["input_ids"] if token < FIRST_RESPONSE_TOKEN)


def make_args(port: int, **overrides: Any) -> Namespace:
    """The arguments that a rollout reads."""
    values: dict[str, Any] = {
        "hf_checkpoint": "fake",
        "sglang_router_ip": "127.0.0.1",
        "sglang_router_port": port,
        "sglang_server_concurrency": 64,
        "sglang_enable_deterministic_inference": False,
        "rollout_num_gpus": 1,
        "rollout_max_response_len": 8,
        "rollout_tools": None,
        "rollout_environment": None,
        "rollout_batch_size": 2,
        "over_sampling_batch_size": 2,
        "n_samples_per_prompt": 2,
        "rollout_sample_hook_path": [],
        "custom_rm_path": f"{__name__}.position_reward",
        "input_key": "prompt",
        "label_key": "label",
        "tool_key": None,
        "router_policy": None,
        "rollout_timeout_s": 60.0,
        "no_rollout_ledger": False,
        "rollout_ledger_dir": None,
        "rollout_ledger_flush_s": 0.02,
        "rollout_ledger_timeout_s": 60.0,
        "start_rollout_id": 0,
    }
    return args_with(**(values | overrides))


def write_prompts(path: Path, prompts: list[str]) -> str:
    """Write a prompt file; a prompt that begins with "dull" is labeled so."""
    rows = [{"prompt": prompt, "label": "dull" if prompt.startswith("dull") else "lively"} for prompt in prompts]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


# Hooks, named by import path in the arguments.

CALLS: list[Any] = []
"""The calls of the hooks below; tests clear it."""


async def position_reward(args: Namespace, graded: Any, **kwargs: Any) -> Any:
    """1 for every sample of a dull prompt; else alternately 1 and 0.  Takes a sample or a list."""
    if isinstance(graded, list):
        CALLS.append([leaf.index for leaf in graded])
        return [await position_reward(args, leaf) for leaf in graded]
    return 1.0 if graded.label == "dull" else float(graded.index % 2)


def plain_reward(args: Namespace, sample: Sample) -> float:
    """A plain function of one sample; it may block."""
    CALLS.append([sample.index, threading.current_thread().name])
    return float(sample.index % 2)


async def fan_out(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
    """Two samples of one execution: the prompt's answer, and a second turn that does not use the engine."""
    from slime.rollout.sglang_rollout import generate

    first = await generate(args, sample, sampling_params)
    first.rollout_id = first.index
    second = Sample.from_dict(first.to_dict())
    second.response += "!"
    return [first, second]


def remember_groups(args: Namespace, groups: list[Any], get_samples: Any = None) -> None:
    """For the two hooks at the end of a rollout."""
    CALLS.append([group[0].index for group in groups])
