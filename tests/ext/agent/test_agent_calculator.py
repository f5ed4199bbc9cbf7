"""The example of docs/agent.md, as the rollout calls it."""

from __future__ import annotations

import asyncio
import re

import openai
import pytest

from slime.ext.agent import session
from slime.rollout.rm_hub.policy import FAILURES
from slime.rollout.sglang_rollout import GenerateState, generate_and_rm
from slime.utils.types import Sample
from tests.flag_values import args_with
from tests.unit.talking_engine import TalkingEngine, make_tokenizer


def policy(prompt):
    result = re.findall(r"<tool_response>(.*?)</tool_response>", prompt)
    if result:
        return f"It is {result[-1]}."
    a, b = re.findall(r"\d+", prompt.rpartition("<|im_start|>user")[2])
    return f'<tool_call>\n{{"name": "multiply", "arguments": {{"a": {a}, "b": {b}}}}}\n</tool_call>'


@pytest.fixture
def args(tmp_path):
    make_tokenizer().save_pretrained(tmp_path)
    engine = TalkingEngine(make_tokenizer(), policy)
    engine.start()
    GenerateState.clear_instances()
    yield args_with(
        hf_checkpoint=str(tmp_path),
        sglang_router_ip="127.0.0.1",
        sglang_router_port=engine.port,
        sglang_server_concurrency=8,
        sglang_enable_deterministic_inference=False,
        sglang_dp_size=1,
        rollout_num_gpus=1,
        rollout_max_response_len=300,
        rollout_seed=0,
        custom_generate_function_path="examples.agent_calculator.generate.generate",
    )
    session.stop_servers()
    engine.stop()
    GenerateState.clear_instances()


def test_the_rollout_gets_one_trained_sample_of_two_turns_with_its_reward(args):
    sample = Sample(index=5, group_index=1, prompt="What is 12 times 13?", label="156")
    params = {"temperature": 1.0, "max_new_tokens": 200}
    (played,) = asyncio.run(generate_and_rm(args, sample, params))
    assert (played.reward, played.index, played.rollout_id) == (1.0, 5, 5)
    assert played.metadata["num_turns"] == 2 and played.metadata["use_tool"]
    assert 0 in played.loss_mask and played.loss_mask[0] == played.loss_mask[-1] == 1
    assert played.response.endswith("It is 156.<|im_end|>")


@pytest.mark.parametrize("is_caught", [True, False])
def test_an_agent_whose_turns_end_with_the_rollout_begins_again_in_another(args, is_caught):
    async def agent(url: str, sid: str) -> float:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=sid) as client:
            said = [{"role": "user", "content": "What is 12 times 13?"}]
            await client.chat.completions.create(model="policy", messages=said)
        GenerateState(args).aborted = True
        if is_caught:
            return 0.0
        raise RuntimeError("the next turn was refused")

    sample = Sample(index=5, prompt="What is 12 times 13?", label="156")
    played = asyncio.run(session.play(args, sample, {"max_new_tokens": 200}, agent))
    assert played is sample and sample.status is Sample.Status.ABORTED
    assert (sample.reward, sample.response_length, sample.tokens) == (None, 0, [])


@pytest.mark.parametrize("has_begun", [True, False])
def test_an_agent_that_dies_costs_its_sample(args, has_begun):
    async def agent(url: str, sid: str) -> float:
        if has_begun:
            async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=sid) as client:
                said = [{"role": "user", "content": "What is 12 times 13?"}]
                await client.chat.completions.create(model="policy", messages=said)
            raise RuntimeError("no room in the sandbox")
        return 1.0

    sample = Sample(index=5, prompt="What is 12 times 13?", label="156")
    assert asyncio.run(session.play(args, sample, {"max_new_tokens": 200}, agent)) is sample
    assert (sample.status, sample.remove_sample, sample.reward) == (Sample.Status.FAILED, True, 0.0)
    why = "no room in the sandbox" if has_begun else "the agent ended before the first request"
    assert why in sample.metadata["reward_error"]
    FAILURES.succeeded()
