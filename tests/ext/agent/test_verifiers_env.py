"""Rollouts of verifiers environments: with a fake package, and with the real one of the extra."""

from __future__ import annotations

import asyncio
import sys
import time

import pytest

from examples.tiny_arithmetic.tokenizer import build_tokenizer
from examples.tiny_tools.agents import call
from slime.ext.agent import session, verifiers_data
from slime.ext.agent.flags import VERIFIERS
from slime.ext.agent.verifiers_env import generate
from slime.rollout.prompt_files import read_rows
from slime.rollout.rm_hub.policy import FAILURES
from slime.rollout.sglang_rollout import generate_and_rm
from slime.utils.errors import ConfigError, GraderError
from slime.utils.types import Sample
from tests.scripted_engine.script import Fault
from tests.unit.talking_engine import make_tokenizer

READERS = {"verifiers": "slime.ext.agent.verifiers_data.read_environment"}
PARAMS = {"temperature": 1.0, "max_new_tokens": 200}

STAND_IN = '''
import asyncio, json, time


class Failed(Exception):
    pass


class Rubric:
    def __init__(self, grouped):
        self.grouped = grouped

    def _get_group_reward_funcs(self):
        return [self.best_of] if self.grouped else []

    async def best_of(self, completions):
        return [1.0 for _ in completions]

    async def score_rollout(self, state):
        if state["fault"] == "score":
            await asyncio.sleep(9)
        state["reward"] = float(state["said"][-1:] == [state["input"]["answer"]])
        state["metrics"] = {"turns": len(state["said"])}


class Products:
    """``a * b``: the policy may call a tool, in at most as many turns as it is asked."""

    def __init__(self, size=4, fault=None, grouped=False, message_type="chat", **unknown):
        if unknown:
            raise TypeError(f"unexpected argument {list(unknown)[0]!r}")
        self.message_type, self.rubric, self.fault, self.size = message_type, Rubric(grouped), fault, size

    def get_dataset(self):
        return [self.row(number) for number in range(self.size)]

    def get_eval_dataset(self):
        return [self.row(100 + number) for number in range(2)]

    def row(self, number):
        prompt = [{"role": "user", "content": f"{number + 12}*13", "tool_calls": None}]
        return {"prompt": prompt, "answer": str((number + 12) * 13), "example_id": number, "task": "products"}

    async def rollout(self, input, client, model, sampling_args=None):
        state = {"input": input, "said": [], "error": None, "is_truncated": False, "fault": self.fault}
        if self.fault == "silent":
            return state
        messages = [{"role": "user", "content": input["prompt"][0]["content"]}]
        tool = {"type": "function", "function": {"name": "multiply", "parameters": {"type": "object"}}}
        while True:
            try:
                answer = await client.chat.completions.create(model=model, messages=messages, tools=[tool])
            except Exception as error:
                state["error"] = Failed("the model")
                state["error"].__cause__ = error
                return state
            said = answer.choices[0].message
            state["said"].append(said.content)
            if not said.tool_calls:
                return state
            if self.fault == "raise":
                raise RuntimeError("no chair")
            if self.fault == "exit":
                raise SystemExit(3)
            if self.fault == "hang":
                await asyncio.sleep(9)
            if self.fault == "block":
                time.sleep(1.5)
            values = json.loads(said.tool_calls[0].function.arguments)
            messages.append(said.model_dump(exclude_none=True))
            product = str(values["a"] * values["b"])
            messages.append({"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": product})


def load_environment(name, **arguments):
    if name != "products":
        raise ValueError(f"Could not import '{name}' environment.")
    return Products(**arguments)
'''


@pytest.fixture(autouse=True)
def nothing_left():
    yield
    session.stop_servers()
    verifiers_data._LOADED.clear()
    FAILURES.succeeded()


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """``import verifiers`` imports the fake."""
    (tmp_path / "verifiers.py").write_text(STAND_IN)
    monkeypatch.delitem(sys.modules, "verifiers", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("verifiers", None)


def rows_of(path):
    return [row for _, row in read_rows(path, readers=READERS)]


def samples_of(path):
    return [Sample(index=n, prompt=row["input"], metadata=row["metadata"]) for n, row in enumerate(rows_of(path))]


def caller(prompt):
    """Calls the tool, then repeats its answer."""
    turns = prompt.split("<|im_start|>")[1:-1]
    role, _, said = turns[-1].partition("<|im_end|>")[0].partition("\n")
    if role == "tool" or said.startswith("<tool_response>"):
        return said.removeprefix("<tool_response>").removesuffix("</tool_response>")
    a, _, b = said.partition("*")
    return call("multiply", a=int(a), b=int(b))


def talk_in_bytes(talk, **attributes):
    """The policy generates byte by byte, while an encoder would merge some; so text that is tokenized again
    differs."""
    args, engine = talk(caller, custom_generate_function_path=VERIFIERS, **attributes)
    make_tokenizer().save_pretrained(args.hf_checkpoint)
    engine.script.tokenizer = make_tokenizer()
    return args, engine


def played(args, sample, params=PARAMS):
    return asyncio.run(generate(args, sample, params))


def trained_text(sample, tokenizer=None):
    """Text of the trained tokens, and of the other tokens after the prompt."""
    response = sample.tokens[-sample.response_length :]
    parts = [[t for t, on in zip(response, sample.loss_mask, strict=True) if on == kind] for kind in (1, 0)]
    return tuple((tokenizer or build_tokenizer()).decode(part) for part in parts)


def check_two_turns(engine, sample, *, product):
    """The sample is the engine's prompts and answers (call, result, answer), and only generated tokens are trained."""
    tokenizer = engine.script.tokenizer
    first, second = [payload["input_ids"] for payload in engine.payloads]
    drawn = [engine.script.replies[tuple(ids)] for ids in (first, second)]
    assert sample.tokens == second + drawn[1] and second[: len(first) + len(drawn[0])] == first + drawn[0]
    between = len(second) - len(first) - len(drawn[0])
    assert between > 0
    assert sample.loss_mask == [1] * len(drawn[0]) + [0] * between + [1] * len(drawn[1])
    log_probs = [engine.script.log_probs_of(ids, 0) for ids in drawn]
    assert sample.rollout_log_probs == log_probs[0] + [0.0] * between + log_probs[1]
    said, observed = trained_text(sample, tokenizer)
    assert said.endswith(f"<|im_end|>{product}<|im_end|>") and product in observed
    assert all(ids != tokenizer.encode(tokenizer.decode(ids), add_special_tokens=False) for ids in drawn[:1])
    assert "multiply" in tokenizer.decode(first)  # the template shows the tool
    assert sample.status is Sample.Status.COMPLETED and sample.metadata["round_number"] == 2


# Rows


def test_rows_name_their_environment_and_number(stand_in):
    rows = rows_of("verifiers:products?size=5")
    assert len(rows) == 5 and rows_of("verifiers:products?size=5@[3:]") == rows[3:]
    assert rows[1] == {
        "input": [{"role": "user", "content": "13*13"}],
        "label": "169",
        "metadata": {
            "source_name": "products",
            "verifiers": {"environment": "verifiers:products?size=5", "index": 1},
        },
    }
    assert [row["label"] for row in rows_of("verifiers-eval:products")] == ["1456", "1469"]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("verifiers:sums", "Could not import 'sums' environment"),
        ("verifiers:products?colour=1", "unexpected argument 'colour'"),
        ("verifiers:products?grouped=true", "its rubric has best_of, a reward of whole groups"),
        ("verifiers:products?message_type=completion", "its message_type is 'completion'; only chat"),
    ],
)
def test_environments_that_cannot_be_used_are_refused_by_name(stand_in, path, message):
    with pytest.raises(ConfigError, match=message) as caught:
        rows_of(path)
    assert path in str(caught.value)


def test_an_environment_that_does_not_load_in_time_is_refused(stand_in, monkeypatch):
    import verifiers

    monkeypatch.setattr(verifiers, "load_environment", lambda name: time.sleep(0.5))
    monkeypatch.setattr(verifiers_data, "LOAD_LIMIT_S", 0.05)
    with pytest.raises(ConfigError, match="TimeoutError: nothing within"):
        rows_of("verifiers:products")


# Rollouts


def test_a_rollout_of_two_turns_is_one_sample_with_the_tokens_that_were_drawn(stand_in, talk):
    args, engine = talk_in_bytes(talk)
    asked = samples_of("verifiers:products")[2]
    (sample,) = asyncio.run(generate_and_rm(args, asked, PARAMS))
    check_two_turns(engine, sample, product="182")
    assert (sample.reward, sample.index, sample.metadata["metrics"]) == (1.0, 2, {"turns": 2})
    assert sample.metadata["source_name"] == "products" and sample.metadata["environment_reward"] == 1.0


@pytest.mark.parametrize("limits", [{"rollout_max_turns": 2}, {"rollout_max_context_len": 200}])
def test_a_limit_truncates_and_keeps_what_was_drawn(stand_in, talk, limits):
    args, engine = talk(lambda prompt: call("multiply", a=2, b=3), **limits)
    (sample,) = played(args, samples_of("verifiers:products")[0])
    assert sample.status is Sample.Status.TRUNCATED and sample.reward == 0.0 and not sample.remove_sample
    assert len(engine.payloads) == sample.metadata["round_number"] >= 2


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("raise", "RuntimeError: no chair"),
        ("exit", "SystemExit: 3"),
        ("hang", "no turn within 1 s"),
        ("block", "no turn within 1 s"),
        ("score", "no reward within 0.5 s"),
        ("silent", "the agent ended before the first request to the policy"),
    ],
)
def test_an_environment_that_breaks_costs_its_sample_and_no_other(stand_in, talk, fault, message):
    args, _ = talk(caller, turn_timeout_s=1.0, rm_timeout_s=0.5)
    broken, whole = samples_of(f"verifiers:products?fault={fault}")[0], samples_of("verifiers:products")[0]

    async def both():
        return await generate(args, broken, PARAMS), await generate(args, whole, PARAMS)

    lost, (kept,) = asyncio.run(both())
    assert lost.status is Sample.Status.FAILED and lost.remove_sample and lost.reward == 0.0
    assert message in lost.metadata["reward_error"]
    assert fault == "silent" or f"products?fault={fault}" in lost.metadata["reward_error"]
    assert lost.loss_mask == [0] and len(lost.tokens) > 1
    assert kept.status is Sample.Status.COMPLETED and kept.reward == 1.0


def test_an_engine_that_fails_is_no_fault_of_the_answer(stand_in, talk):
    args, _ = talk(caller, script={"faults": [Fault("status", status=400)]}, rm_max_failures=1)
    with pytest.raises(GraderError, match="verifiers:products: Failed: the model .*Error code: 502"):
        played(args, samples_of("verifiers:products")[0])


# The package itself

ENVIRONMENTS = '''
import verifiers as vf
from datasets import Dataset


def multiply(a: int, b: int) -> int:
    """Multiply two integers.

    Args:
        a: the first.
        b: the second.
    """
    return a * b


def correct(completion, answer, **kwargs) -> float:
    return float(completion[-1]["content"] == answer)


def load_environment(kind="tools"):
    rows = Dataset.from_list([{"question": f"{n}*13", "answer": str(n * 13)} for n in range(12, 16)])
    common = {"dataset": rows, "rubric": vf.Rubric(funcs=[correct])}
    if kind == "single":
        return vf.SingleTurnEnv(**common, system_prompt="Multiply.")
    return vf.ToolEnv(**common, tools=[multiply], max_turns=3)
'''


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An environment of the real package."""
    pytest.importorskip("verifiers", reason="the extra `verifiers` is not installed")
    (tmp_path / "env_for_tests.py").write_text(ENVIRONMENTS)
    monkeypatch.delitem(sys.modules, "env_for_tests", raising=False)
    monkeypatch.syspath_prepend(tmp_path)


def test_the_packages_single_turn(package, talk):
    args, engine = talk(lambda prompt: "169")
    samples = samples_of("verifiers:env-for-tests?kind=single")
    (sample,) = played(args, samples[1])
    assert samples[1].prompt == [{"role": "system", "content": "Multiply."}, {"role": "user", "content": "13*13"}]
    assert (sample.reward, trained_text(sample)) == (1.0, ("169<|im_end|>", ""))
    assert "Multiply." in build_tokenizer().decode(engine.payloads[0]["input_ids"])
    (wrong,) = played(args, samples[0])
    assert (wrong.reward, wrong.status) == (0.0, Sample.Status.COMPLETED)


def test_the_packages_tools_over_two_turns(package, talk):
    args, engine = talk_in_bytes(talk)
    (sample,) = asyncio.run(generate_and_rm(args, samples_of("verifiers:env-for-tests")[2], PARAMS))
    check_two_turns(engine, sample, product="182")
    assert sample.reward == 1.0 and sample.metadata["metrics"]["multiply_calls"] == 1
