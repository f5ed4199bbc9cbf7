"""Whole rollouts while an engine or the reward server fails: they end with the same samples, or the first cause."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from slime.rollout import engine_request, sglang_streaming_rollout
from slime.rollout.base_types import leaf_samples
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.rm_hub import policy
from slime.rollout.sglang_rollout import GenerateState, generate, generate_rollout
from slime.train_data.convert import samples_to_train_data
from slime.utils import http_utils
from slime.utils.async_utils import run
from slime.utils.http_utils import close_http_client, init_http_client
from slime.utils.types import Sample
from tests.scripted_engine.script import Fault, Script
from tests.scripted_engine.server import ScriptedEngine
from tests.unit.rollout.fake_cluster import clear_process, make_args, write_prompts

PROMPTS = ["a", "b", "c", "d"]
STREAMING = f"{sglang_streaming_rollout.__name__}.generate_streaming"
TOLERANT = {
    "use_fault_tolerance": True,
    "rollout_health_check_interval": 5.0,
    "rollout_health_check_timeout": 5.0,
    "engine_start_timeout_s": 30.0,
}
Rollout = Callable[..., list[Sample]]


@pytest.fixture
def rollout(tmp_path, monkeypatch) -> Iterator[Rollout]:
    """Samples of one rollout with an engine of the given faults; ``rollout.engine`` is the engine."""
    for module in (http_utils, sglang_streaming_rollout):
        monkeypatch.setattr(module, "RETRY_WAIT_S", 0.05)
    monkeypatch.setattr(engine_request, "BAD_ANSWER_WAIT_S", 0.05)
    monkeypatch.setattr(policy, "FAILURES", policy.FailureCount())
    engines: list[ScriptedEngine] = []

    def start(*faults: Fault, and_then: Callable[[ScriptedEngine], None] | None = None, **flags: Any) -> list[Sample]:
        clear_process(monkeypatch)
        engine = ScriptedEngine(Script(length=8, faults=list(faults)))
        engines.append(engine)
        engine.start()
        prompts = write_prompts(tmp_path / "prompts.jsonl", PROMPTS)
        sizes = {"rollout_batch_size": 4, "over_sampling_batch_size": 4, "rollout_max_response_len": 16}
        seeds = {"sglang_enable_deterministic_inference": True}
        args = make_args(engine.port, prompt_data=prompts, **(sizes | seeds | flags))
        init_http_client(args)
        helper = threading.Thread(target=and_then, args=(engine,)) if and_then else None
        if helper:
            helper.start()
        output = generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
        if helper:
            helper.join(30)
        return list(leaf_samples(output.samples))

    yield start
    run(close_http_client())
    GenerateState.clear_instances()
    for engine in engines:
        engine.stop()


def facts(samples: list[Sample]) -> list[Any]:
    return [(s.index, s.tokens, s.rollout_log_probs, s.status, s.reward) for s in samples]


@pytest.mark.parametrize("path", [None, STREAMING], ids=["plain", "streaming"])
@pytest.mark.parametrize(
    "fault",
    [
        Fault("garbage", times=3),
        Fault("empty", times=3),
        Fault("half", times=3),
        Fault("status", status=500, times=3),
        Fault("status", status=502, times=3),
        Fault("status", status=429, times=3),
        Fault("slow", seconds=0.5, times=3),
    ],
    ids=lambda fault: f"{fault.kind}{fault.status if fault.kind == 'status' else ''}",
)
def test_the_samples_are_those_of_a_rollout_without_the_fault(rollout, fault, path):
    wanted = facts(rollout(custom_generate_function_path=path))
    assert facts(rollout(fault, custom_generate_function_path=path, **TOLERANT)) == wanted
    assert fault.times == 0, "the fault did not strike"


@pytest.mark.parametrize("kind", ["hang", "die"])
def test_requests_of_an_engine_that_is_replaced_are_asked_again(rollout, kind):
    def replace(engine: ScriptedEngine) -> None:
        """Do what the health monitor does with a hung engine: kill it and start a replacement."""
        give_up_s = time.monotonic() + 30
        while engine.calls["/generate"] < 8 and engine.is_up and time.monotonic() < give_up_s:
            time.sleep(0.02)
        time.sleep(0.2)
        engine.stop()
        engine.start()

    wanted = facts(rollout())
    assert facts(rollout(Fault(kind, requests=[2]), and_then=replace, **TOLERANT)) == wanted


async def gives_up(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """An agent that dies at the second sample of each prompt, and reports it in the original's way."""
    if sample.index % 2:
        sample.status, sample.remove_sample = Sample.Status.ABORTED, True
        return sample
    return await generate(args, sample, sampling_params)


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_an_agent_that_gives_up_costs_its_sample_and_training_gets_the_others(rollout, top_p):
    samples = rollout(custom_generate_function_path=f"{__name__}.gives_up")
    lost = [sample for sample in samples if sample.index % 2]
    assert len(samples) == 8 and {s.status for s in samples if not s.index % 2} == {Sample.Status.COMPLETED}
    assert all(s.status is Sample.Status.FAILED and s.remove_sample and s.reward == 0.0 for s in lost)
    for sample in samples:
        sample.rollout_top_p_token_ids, sample.rollout_top_p_token_offsets = (
            (None, None) if sample in lost else ([], [0] * (sample.response_length + 1))
        )
    rewards = [float(sample.reward) for sample in samples]
    data = samples_to_train_data(samples, rewards, rewards, rollout_top_p=top_p)
    for sample, mask, log_probs in zip(samples, data.loss_masks, data.rollout_log_probs, strict=True):
        assert len(mask) == len(log_probs) == sample.response_length > 0 and any(mask) is (sample not in lost)
