"""Rollouts of environments of the package verifiers: ``--prompt-data 'verifiers:NAME?argument=value'``.

The environment talks to the adapter of ``slime.agent`` as to any OpenAI-compatible server: tokens stay as they were
drawn, what is between the turns is masked, and its rubric gives the reward.  All environments run in an event loop of
their own, so that one that blocks does not hold up the rollout's deadlines.
"""

from __future__ import annotations

import asyncio
import functools
import time
from argparse import Namespace
from collections.abc import Coroutine, Mapping
from typing import Any

import httpx

from slime.ext.agent.session import TURN_TIMEOUT_S, play
from slime.ext.agent.verifiers_data import load, row_of
from slime.flags.reward import RewardConfig
from slime.rollout.rm_hub.policy import within
from slime.rollout.tools import EnvironmentFailure, TurnsConfig, set_reward
from slime.utils.async_utils import AsyncLoopThread
from slime.utils.errors import ConfigError, DataError
from slime.utils.types import Sample

_LIMITS = ("context_length_exceeded", "turn_limit")
"""Codes with which the adapter refuses a further turn."""
_OF_THE_POLICY = {"EmptyModelResponseError", "ToolError"}
"""Errors of verifiers that end a rollout as what the policy said does; its reward counts."""


async def generate(
    args: Namespace, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> Sample | list[Sample]:
    """Let the environment of the row run its rollout, and return its samples with the rubric's reward.

    A limit that ends the rollout makes them TRUNCATED.  An environment that raises, or is later than
    ``--turn-timeout-s`` between two turns, costs its sample, which is FAILED and trains nothing.
    """
    asked = sample.metadata.get("verifiers")
    if asked is None:
        raise DataError(f"Sample {sample.index} is no row of a --prompt-data verifiers:NAME, which {__name__} plays.")
    path = asked["environment"]
    await asyncio.to_thread(load, path)  # it is there already, unless the rows came from the ledger
    ended: Mapping[str, Any] = {}

    async def agent(url: str, sid: str) -> float:
        nonlocal ended
        try:
            ended = await _rollout(path, asked["index"], f"{url}/v1", sid, TurnsConfig.of(args).turn_timeout_s)
            if (error := _failure_of(ended)) is not None:
                raise error
            score = load(path).rubric.score_rollout(ended)
            await within(RewardConfig.of(args).rm_timeout_s, _elsewhere(score))
            return float(ended["reward"])
        except (Exception, SystemExit) as error:  # the environment's code may raise anything
            cause = "" if error.__cause__ is None else f" ({error.__cause__})"
            raise EnvironmentFailure(f"{path}: {type(error).__name__}: {error}{cause}") from error

    played = await play(args, sample, sampling_params, agent, evaluation=evaluation)
    is_cut = bool(ended.get("is_truncated")) or ended.get("error") is not None
    return await rewarded(RewardConfig.of(args), played, ended, is_cut=is_cut)


async def rewarded(
    config: RewardConfig, played: Sample | list[Sample], ended: Mapping[str, Any], *, is_cut: bool
) -> Sample | list[Sample]:
    """Give the samples of a session the ``reward`` and the ``metrics`` of its end, unless a grader is named."""
    for one in played if isinstance(played, list) else ():
        is_whole = not (one.metadata["truncated"] or is_cut)
        one.status = Sample.Status.COMPLETED if is_whole else Sample.Status.TRUNCATED
        one.metadata |= {"round_number": one.metadata["num_turns"], "metrics": ended.get("metrics")}
        one.reward = None  # unless no grader is named
        await set_reward(config, one, float(ended["reward"]), None)
    return played


def check(args: Namespace) -> None:
    """Refuse flags of other conversations."""
    config = TurnsConfig.of(args)
    if config.rollout_tools or config.rollout_environment:
        raise ConfigError(
            "--rollout-tools and --rollout-environment are of other conversations: an environment of verifiers brings "
            "its tools. Leave them out, or name other prompts than verifiers:NAME in --prompt-data."
        )


generate.check_args = check  # type: ignore[attr-defined]


def _failure_of(state: Mapping[str, Any]) -> BaseException | None:
    """Return the error that ended a rollout, unless it is a limit or what the policy said."""
    error = state.get("error")
    is_limit = getattr(getattr(error, "__cause__", None), "code", None) in _LIMITS
    is_said = _OF_THE_POLICY & {kind.__name__ for kind in type(error).__mro__}
    return None if is_limit or is_said else error


class _Wire(httpx.AsyncHTTPTransport):
    """Sends the requests of one rollout; while one is open the policy generates, and the environment is not late."""

    def __init__(self) -> None:
        super().__init__(verify=False)  # plain HTTP in this machine: certificates would be loaded for each rollout
        self.num_open = 0
        self.heard_s = time.monotonic()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.num_open += 1
        try:
            return await super().handle_async_request(request)
        finally:
            self.num_open -= 1
            self.heard_s = time.monotonic()


async def _rollout(path: str, index: int, url: str, key: str, limit_s: float) -> Mapping[str, Any]:
    """Return the state in which the environment's rollout of a row ended.

    Raises:
        TimeoutError: it took more than ``limit_s`` seconds before, between or after its turns.
    """
    import openai

    wire = _Wire()

    async def run() -> Mapping[str, Any]:
        web = httpx.AsyncClient(transport=wire, timeout=TURN_TIMEOUT_S)
        async with openai.AsyncOpenAI(
            base_url=url, api_key=key, max_retries=0, timeout=TURN_TIMEOUT_S, http_client=web
        ) as client:
            return await load(path).rollout(row_of(path, index), client, "policy", {})

    call = _elsewhere(run())
    try:
        while not call.done():
            left_s = limit_s if wire.num_open else wire.heard_s + limit_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(f"no turn within {limit_s:g} s (--turn-timeout-s)")
            await asyncio.wait({call}, timeout=left_s)
        return call.result()
    finally:
        call.cancel()


@functools.cache
def _loop() -> AsyncLoopThread:
    """Return the event loop of all environments: what they share between rollouts belongs to one."""
    return AsyncLoopThread()


def _elsewhere(call: Coroutine[Any, Any, Any]) -> asyncio.Future[Any]:
    return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call, _loop().loop))
