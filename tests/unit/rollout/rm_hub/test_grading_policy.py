"""If a grader hangs, crashes or returns nonsense, its response is lost, not the run."""

from __future__ import annotations

import asyncio
import logging
import re
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import torch
from aiohttp import web

from slime.flags.reward import RewardConfig
from slime.rollout import rm_hub
from slime.rollout.rm_hub import async_rm, math_utils, policy, remote
from slime.rollout.rm_hub.policy import GraderThreads, check_graded
from slime.utils.async_utils import run
from slime.utils.errors import ConfigError, GraderError, HookError
from slime.utils.http_utils import close_http_client
from slime.utils.types import Sample
from tests.http_server import served

RIGHT = "\\boxed{7}"


def args(**flags: Any) -> Namespace:
    values = {"custom_rm_path": None, "rm_type": None, "rm_url": None, "reward_key": None, "rm_timeout_s": 0.2}
    return Namespace(**(values | flags))


async def moody(args: Namespace, sample: Any, **kwargs: Any) -> Any:
    """Does what the response says."""
    if isinstance(sample, list):
        return [await moody(args, one) for one in sample]
    if sample.response == "hang":
        await asyncio.sleep(3600)
    if sample.response == "deaf":
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline:
            try:
                await asyncio.sleep(1)
            except asyncio.CancelledError:
                pass
    errors = {"crash": KeyError("x"), "flag": ConfigError("--x"), "hook": HookError("y")}
    if sample.response in errors:
        raise errors[sample.response]
    rewards = {"nan": float("nan"), "nan32": np.float32("nan"), "text": "seven", "dict": {"score": 2.0}, "none": None}
    rewards |= {"tensor": torch.tensor(0.5), "tensors": {"score": torch.tensor([2.0]), "why": "x"}}
    return rewards.get(sample.response, 1.0)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(policy, "FAILURES", policy.FailureCount())
    monkeypatch.setattr(rm_hub, "load_function", lambda path: moody)
    yield


def grade(response: str, **flags: Any) -> tuple[Any, Sample]:
    sample = Sample(index=3, response=response, status=Sample.Status.COMPLETED, metadata={"kept": 1})
    return asyncio.run(async_rm(args(custom_rm_path="moody", **flags), sample)), sample


@pytest.mark.parametrize("response", ["hang", "crash", "nan", "nan32", "deaf"])
def test_with_the_policy_zero_a_failed_grading_is_a_logged_zero(response, caplog):
    with caplog.at_level(logging.WARNING):
        reward, sample = grade(response, rm_failure_policy="zero")
    assert sample.is_graded and reward == 0.0 and sample.status is Sample.Status.COMPLETED and not sample.remove_sample
    assert sample.metadata["kept"] == 1 and sample.metadata["reward_error"]
    assert "sample 3 could not be graded" in caplog.text


@pytest.mark.parametrize("flags", [{}, {"rm_failure_policy": "failed"}])
def test_by_default_a_response_that_is_not_graded_does_not_train(flags):
    reward, sample = grade("crash", **flags)
    assert reward == 0.0 and sample.status is Sample.Status.FAILED and sample.remove_sample and not sample.is_graded
    assert sample.metadata["reward_error"] == "KeyError: 'x'"


def test_with_the_policy_raise_the_run_ends():
    with pytest.raises(KeyError):
        grade("crash", rm_failure_policy="raise")


@pytest.mark.parametrize(("response", "error"), [("flag", ConfigError), ("hook", HookError)])
def test_mistakes_of_the_flags_end_the_run_under_every_policy(response, error):
    with pytest.raises(error):
        grade(response)


@pytest.mark.parametrize(
    ("response", "reward"), [("dict", {"score": 2.0}), ("text", {"score": 0.0}), ("ok", 1.0), ("none", {"score": 0.0})]
)
def test_a_reward_key_wants_an_object_that_has_it(response, reward):
    assert grade(response, reward_key="score", eval_reward_key="score")[0] == reward
    assert grade("dict", reward_key="acc")[0] == {"acc": 0.0}


@pytest.mark.parametrize(
    ("response", "said"),
    [
        ("text", r"the reward is 'seven' \(str\); it must be a number$"),
        ("none", r"the reward is None \(NoneType\); it must be a number$"),
        ("dict", r"\(dict\); it must be a number; give --reward-key with its entry$"),
    ],
)
def test_what_is_no_reward_is_named_at_the_first_grading_unless_a_plug_in_reads_it(response, said, caplog):
    reward, sample = grade(response)
    assert "`slime check moody` (--custom-rm-path) calls the function as a run does." in caplog.text
    assert reward == 0.0 and not sample.is_graded
    error = sample.metadata["reward_error"]
    assert error.startswith("ValueError: moody: the reward is ")
    assert re.search(said, error)
    for flag in ("custom_reward_post_process_path", "custom_convert_samples_to_train_data_path"):
        reward, sample = grade(response, **{flag: "a.b"})
        assert sample.is_graded and reward == asyncio.run(moody(args(), Sample(response=response)))


def test_a_tensor_of_one_number_is_a_reward():
    assert type(grade("tensor")[0]) is float
    assert grade("tensors", reward_key="score")[0] == {"score": 2.0, "why": "x"}


def test_failures_in_a_row_end_the_run_with_the_first_cause():
    flags = args(custom_rm_path="moody", rm_max_failures=3)

    async def run(responses: list[str]) -> None:
        for response in responses:
            await async_rm(flags, Sample(response=response))

    asyncio.run(run(["crash", "crash", "ok", "crash", "nan"]))
    with pytest.raises(GraderError, match="last 3 gradings failed .* first of them with KeyError") as error:
        asyncio.run(run(["crash"]))
    assert "--custom-rm-path moody raised KeyError: 'x'" in str(error.value) and "in moody" in str(error.value)


def test_a_rollout_without_a_graded_response_ends_a_run_too_short_for_the_row():
    failed = [Sample(metadata={"reward_error": "KeyError: 'x'"}), Sample(metadata={"reward_error": "ValueError: y"})]
    with pytest.raises(GraderError, match="None of the 2 responses .* failed with KeyError: 'x'.*--rm-max-failures 0"):
        check_graded(RewardConfig.of(args()), failed)
    check_graded(RewardConfig.of(args()), [*failed, Sample(metadata=None)])
    check_graded(RewardConfig.of(args(rm_max_failures=0)), failed)
    check_graded(RewardConfig.of(args()), [])


def test_an_overdue_thread_is_replaced_and_others_are_graded_meanwhile():
    threads = GraderThreads(num_threads=1)
    release = threading.Event()

    async def main() -> list[Any]:
        with pytest.raises(TimeoutError, match="within 0.1 s"):
            await threads.run(release.wait, 30.0, timeout_s=0.1)
        return await asyncio.gather(*(threads.run(lambda k=k: k, timeout_s=5.0) for k in range(20)))

    assert asyncio.run(main()) == list(range(20))
    release.set()


def test_a_cancelled_grading_takes_no_thread_from_those_that_follow():
    threads = GraderThreads(num_threads=1)
    release = threading.Event()

    async def main() -> int:
        begun = asyncio.create_task(threads.run(release.wait, 30.0, timeout_s=30.0))
        waiting = asyncio.create_task(threads.run(release.wait, 30.0, timeout_s=30.0))
        await asyncio.sleep(0.1)
        begun.cancel()
        waiting.cancel()
        await asyncio.gather(begun, waiting, return_exceptions=True)
        async with asyncio.timeout(10):
            return await threads.run(lambda: 1, timeout_s=5.0)

    assert asyncio.run(main()) == 1
    release.set()


def test_work_that_a_grader_cancels_is_a_failure_and_not_the_end_of_its_caller():
    threads = GraderThreads(num_threads=1)

    def cancels() -> None:
        work: Future[None] = Future()
        work.cancel()
        work.result()

    async def main() -> int:
        with pytest.raises(GraderError, match="was cancelled"):
            await threads.run(cancels, timeout_s=5.0)
        return await threads.run(lambda: 1, timeout_s=5.0)

    assert asyncio.run(main()) == 1


def test_waiting_for_a_thread_does_not_count_against_the_deadline():
    threads = GraderThreads(num_threads=1)

    async def main() -> list[Any]:
        return await asyncio.gather(*(threads.run(time.sleep, 0.05, timeout_s=1.4) for _ in range(30)))

    assert asyncio.run(main()) == [None] * 30


def test_a_built_in_grader_that_fails_or_hangs_gives_zero(monkeypatch):
    hanging = dict(rm_hub._GRADERS, math=lambda sample: time.sleep(1.0), f1=lambda sample: 1 / 0)
    monkeypatch.setattr(rm_hub, "_GRADERS", hanging)
    for rm_type in ("math", "f1"):
        sample = Sample(response=RIGHT, label="7")
        assert asyncio.run(async_rm(args(rm_type=rm_type), sample)) == 0.0
        assert sample.metadata["reward_error"]


def ask(handle: Callable[[web.Request], Any], monkeypatch: pytest.MonkeyPatch, **flags: Any) -> tuple[Any, Sample]:
    """Grade one sample by a server in this process."""
    sample = Sample(index=0, prompt="p", response="r", label="l")

    async def main() -> Any:
        async with served(handle) as port:
            return await async_rm(args(rm_type="remote_rm", rm_url=f"http://127.0.0.1:{port}/", **flags), sample)

    return asyncio.run(main()), sample


@pytest.mark.parametrize("body", ['"bad"', "null", "[1]", "<html>", ""])
def test_garbage_from_a_reward_server_is_asked_for_again_and_then_zero(body, monkeypatch):
    bodies = []

    async def garbage(request: web.Request) -> web.Response:
        bodies.append(body)
        return web.Response(text=body) if len(bodies) < 3 else web.json_response(0.5)

    monkeypatch.setattr(remote, "MAX_WAIT_S", -1.0)
    monkeypatch.setattr(remote.random, "random", lambda: 1.0)
    reward, _ = ask(garbage, monkeypatch, rm_timeout_s=30.0)
    assert reward == 0.5 and len(bodies) == 3


def test_a_reward_server_that_is_down_costs_the_response(monkeypatch):
    monkeypatch.setattr(remote, "MAX_WAIT_S", -1.0)
    monkeypatch.setattr(remote.random, "random", lambda: 1.0)
    sample = Sample(index=0, prompt="p")
    flags = args(rm_type="remote_rm", rm_url="http://127.0.0.1:9/", rm_timeout_s=60.0)

    async def main() -> Any:
        try:
            return await async_rm(flags, sample)
        finally:
            await close_http_client()

    assert asyncio.run(main()) == 0.0
    assert "failed 10 times" in sample.metadata["reward_error"]


@pytest.mark.parametrize("path", ["down", "fails", "says"])
def test_credentials_of_the_reward_server_are_not_written_down(monkeypatch, caplog, path):
    monkeypatch.setattr(remote, "MAX_WAIT_S", -1.0)
    monkeypatch.setattr(remote.random, "random", lambda: 1.0)

    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=500) if path == "fails" else web.json_response(f"no answer from {url}")

    async def main() -> Any:
        nonlocal url
        async with served(answer) as port:
            url = f"http://user:hidden@127.0.0.1:{9 if path == 'down' else port}/{path}"
            return await async_rm(args(rm_type="remote_rm", rm_url=url, rm_timeout_s=60.0), sample)

    url, sample = "", Sample(index=0, prompt="p")
    with caplog.at_level(logging.WARNING):
        assert asyncio.run(main()) == 0.0
    assert "http://(secret)@127.0.0.1" in caplog.text and "failed 10 times" in sample.metadata["reward_error"]
    assert "hidden" not in caplog.text + sample.metadata["reward_error"]


def test_math_verify_is_used_where_it_is_installed():
    flags = args(rm_type="math_verify", rm_timeout_s=120.0)
    sample = Sample(response="so \\boxed{\\frac{2}{4}}", label="\\frac{1}{2}")
    if math_utils.is_math_verify_installed():
        assert asyncio.run(async_rm(flags, sample)) == 1
        assert asyncio.run(async_rm(flags, Sample(response="\\boxed{3}", label="4"))) == 0
    else:
        with pytest.raises(ConfigError, match="pip install"):
            asyncio.run(async_rm(flags, sample))


def test_a_grader_that_exits_ends_the_run_with_its_name(monkeypatch):
    async def leaves(args: Namespace, sample: Any, **kwargs: Any) -> float:
        raise SystemExit(0)

    monkeypatch.setattr(rm_hub, "load_function", lambda path: leaves)
    sample = Sample(index=3, group_index=1)
    with pytest.raises(
        HookError, match="--custom-rm-path mine.grade, called for sample 3 of group 1, raised SystemExit"
    ):
        run(async_rm(args(custom_rm_path="mine.grade"), sample), timeout_s=20)
