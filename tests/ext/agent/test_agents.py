"""The agents of examples/strands, tau-bench and coding_agent_rl, with a scripted engine."""

from __future__ import annotations

import asyncio
import importlib
import sys

import pytest

from examples.tiny_arithmetic.tokenizer import build_tokenizer
from examples.tiny_tools import agents
from slime.ext.agent import session
from slime.rollout.sglang_rollout import generate_and_rm
from slime.utils.types import Sample


@pytest.fixture(autouse=True)
def no_servers():
    yield
    session.stop_servers()


@pytest.fixture
def tau(monkeypatch):
    """The modules of examples/tau-bench, whose folder is not a package."""
    monkeypatch.syspath_prepend("examples/tau-bench")
    for name in ("tau_env", "generate_with_tau"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("generate_with_tau")


def turns_of(prompt):
    """Role and text of each message of a rendered prompt."""
    return [turn.partition("<|im_end|>")[0].partition("\n")[::2] for turn in prompt.split("<|im_start|>")[1:-1]]


# tau-bench


def clerk(prompt):
    """Looks up the orders, cancels the last one, and says so."""
    said = turns_of(prompt)
    if said[-1][0] == "user":
        return agents.call("get_orders", user=said[-1][1].rpartition(" ")[2])
    return "done" if said[-1][1] == "ok" else agents.call("cancel_order", order=int(said[-1][1].split()[-1]))


def careless_clerk(prompt):
    return clerk(prompt) if turns_of(prompt)[-1][0] == "user" or " " not in turns_of(prompt)[-1][1] else "done"


@pytest.mark.parametrize(("policy", "reward"), [(clerk, 1.0), (careless_clerk, 0.0)])
def test_a_task_ends_with_the_verdict_of_the_database(talk, tau, policy, reward):
    args, engine = talk(policy, custom_generate_function_path="generate_with_tau.generate")
    sample = Sample(index=0, prompt="any", metadata={"task_index": 3})
    sample = asyncio.run(generate_and_rm(args, sample, {"max_new_tokens": 300}))
    name, orders = agents.order_task(3)
    assert (sample.reward, sample.status) == (reward, Sample.Status.COMPLETED)
    assert sample.metadata["actions"][0] == ("get_orders", {"user": name})
    assert sample.metadata["actions"][-1] == ("respond", {"content": "done"})
    assert sample.prompt == f"<|im_start|>user\ncancel last order of {name}<|im_end|>\n<|im_start|>assistant\n"
    observations = "".join(
        character
        for character, on in zip(
            (build_tokenizer().decode([token]) for token in sample.tokens[-sample.response_length :]), sample.loss_mask
        )
        if not on
    )
    assert " ".join(map(str, orders)) in observations and "done" not in observations


# coding_agent_rl


def programmer(prompt):
    """Wrong at first, right after the tests' message."""
    question = turns_of(prompt)[0][1]
    if turns_of(prompt)[-1] == ("user", agents.WRONG):
        return f"```python\ndef f(a): return {question.removeprefix('f(a)=')}\n```"
    return agents.program(2, 1, "-")


@pytest.mark.parametrize(("policy", "reward"), [(programmer, 1.0), (lambda prompt: "no idea", 0.0)])
def test_a_coding_agent_is_graded_by_the_tests_of_its_task(talk, policy, reward):
    args, engine = talk(policy, custom_generate_function_path="examples.coding_agent_rl.generate.generate")
    row = agents.code_row(7, 3, "+")
    sample = Sample(index=4, prompt="any", metadata=row["metadata"])
    (sample,) = asyncio.run(generate_and_rm(args, sample, {"max_new_tokens": 100}))
    assert (sample.reward, sample.metadata["num_turns"], sample.rollout_id) == (reward, 2, 4)
    first, second = [payload["input_ids"] for payload in engine.payloads]
    assert sample.tokens[: len(second)] == second and second[: len(first)] == first
    assert 0 in sample.loss_mask and sample.loss_mask[-1] == 1


# strands


def caller(prompt):
    said = turns_of(prompt)
    if said[-1][0] == "tool":
        return f"\\boxed{{{said[-1][1]}}}"
    a, _, b = said[-1][1].partition("*")
    return agents.call("multiply", a=int(a), b=int(b))


@pytest.mark.parametrize(("label", "reward"), [("9716", 1.0), ("1", 0.0)])
def test_a_strands_agent_calls_its_tool_and_answers(talk, label, reward):
    pytest.importorskip("strands", reason="the extra `strands` is not installed")
    args, engine = talk(caller, custom_generate_function_path="examples.strands.generate_with_strands.generate")
    sample = Sample(index=2, prompt="any", label=label, metadata={"question": "347*28"})
    (sample,) = asyncio.run(generate_and_rm(args, sample, {"max_new_tokens": 100}))
    assert (sample.reward, sample.metadata["num_turns"]) == (reward, 2)
    assert sample.tokens[: len(engine.payloads[1]["input_ids"])] == engine.payloads[1]["input_ids"]
    assert sample.response.endswith("9716<|im_end|>\n<|im_start|>assistant\n\\boxed{9716}<|im_end|>")
