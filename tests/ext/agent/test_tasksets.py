"""Verifiers tasks in a separate interpreter: with a fake, and with the package where it is installed."""

from __future__ import annotations

import asyncio
import os
import sys

import pytest

from slime.ext.agent import session, tasksets
from slime.ext.agent.flags import check_verifiers, derive_verifiers
from slime.rollout.prompt_files import read_rows
from slime.rollout.rm_hub.policy import FAILURES
from slime.utils.errors import ConfigError
from slime.utils.types import Sample

READERS = {"taskset:": "slime.ext.agent.tasksets.read_tasks"}
PARAMS = {"temperature": 1.0, "max_new_tokens": 200}
REAL = os.environ.get("SLIME_TEST_VERIFIERS_PYTHON")
"""A Python with verifiers 0.4 or later."""

STAND_IN = """
import asyncio, json, os, urllib.request
from contextlib import asynccontextmanager
from types import SimpleNamespace as Of


class Taskset:
    def __init__(self, config):
        self.bounded = config.kind != "endless"

    def __iter__(self):
        number = 0
        while number < 4 or not self.bounded:
            yield Of(data=Of(prompt=f"{number}*13", system_prompt="Multiply.", answer=str(number * 13)))
            number += 1


def load_taskset(config):
    if config.id != "products":
        raise ModuleNotFoundError(f"taskset {config.id!r} not found")
    return Taskset(config)


def resolve_env_config(config):
    taskset, agent = config["taskset"], config.get("agent", {})
    runtime = Of(type=agent.get("runtime", {}).get("type", "prime"))
    return Of(taskset=Of(id=taskset["id"], kind=taskset.get("kind")), agent=Of(**agent | {"runtime": runtime}))


class Environment:
    def __init__(self, config):
        code = getattr(config.agent, "harness", {}).get("id") == "bash"
        self.config, self._harnesses = config, {"agent": Of(EXECUTES_CODE=code, config=Of(id="bash"))}

    @asynccontextmanager
    async def serving(self):
        yield

    def slots(self, task):
        return (task,)

    async def run_slot(self, task, context):
        kind = self.config.taskset.kind
        if kind == "crash":
            os._exit(3)
        if kind == "hang":
            await asyncio.sleep(3600)
        print("chatter on standard output")
        errors, said = [], []
        for _ in range(self.config.agent.max_turns if kind == "long" else 1):
            try:
                said.append(await asyncio.to_thread(ask, context.client, task.data.prompt))
            except Exception as error:
                errors.append(Of(type="ProviderError", message=str(error)))
        if kind == "broken":
            errors.append(Of(type="TaskError", message="no chair"))
        reward = float(said[-1:] == [task.data.answer])
        trace = Of(errors=errors, reward=reward, metrics={"turns": len(said)}, is_timeout=False)
        trace.is_truncated = kind == "long"
        return Of(errors=[], traces=[trace], is_timeout=False)


load_environment = Environment


def ask(client, prompt):
    body = {"model": "policy", "messages": [{"role": "user", "content": prompt}]}
    key = os.environ[client.api_key_var]
    request = urllib.request.Request(
        f"{client.base_url}/chat/completions", json.dumps(body).encode(),
        {"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]
"""

PACKAGE = """
import verifiers.v1 as vf


class ProductData(vf.TaskData):
    answer: str


class Product(vf.Task[ProductData]):
    @vf.reward
    async def correct(self, task: ProductData, trace: vf.Trace) -> float:
        return float(trace.assistant_messages[-1].content.strip() == task.answer)


class Products(vf.Taskset[Product, vf.TasksetConfig]):
    def load(self):
        for number in range(4):
            yield Product(ProductData(prompt=f"{number}*13", answer=str(number * 13)), self.config.task)


__all__ = ["Products"]
"""


@pytest.fixture(autouse=True)
def nothing_left():
    yield
    session.stop_servers()
    tasksets.stop()
    FAILURES.succeeded()


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    folder = tmp_path / "verifiers/v1/utils"
    folder.mkdir(parents=True)
    (folder / "loaders.py").write_text(STAND_IN)
    (folder.parent / "__init__.py").write_text(
        "from types import SimpleNamespace\nEvalClientConfig = ModelContext = SimpleNamespace\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLIME_AGENT_VERIFIERS_PYTHON", sys.executable)


def samples_of(path):
    rows = [row for _, row in read_rows(path, readers=READERS)]
    return [Sample(index=n, prompt=row["input"], metadata=row["metadata"]) for n, row in enumerate(rows)]


def played(args, *samples):
    async def all_at_once():
        return await asyncio.gather(*(tasksets.generate(args, one, PARAMS) for one in samples))

    return asyncio.run(all_at_once())


def multiply(prompt):
    a, b = prompt.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0].split("*")
    return str(int(a) * int(b))


def test_rows_are_the_tasks_and_those_without_end_need_a_bound(stand_in):
    rows = [row for _, row in read_rows("taskset:products@[1:3]", readers=READERS)]
    assert rows[0]["input"] == [{"role": "system", "content": "Multiply."}, {"role": "user", "content": "1*13"}]
    assert [row["metadata"]["taskset"] for row in rows] == [{"path": "taskset:products", "index": n} for n in (1, 2)]
    assert len(samples_of("taskset:products?kind=endless@[0:7]")) == 7
    for path, message in (
        ("taskset:products?kind=endless", "take some of them by @"),
        ("taskset:sums", "'sums' not found"),
    ):
        with pytest.raises(ConfigError, match=message):
            samples_of(path)


def test_a_task_is_played_by_the_policy_and_rewarded(stand_in, talk):
    args, engine = talk(multiply, taskset_timeout_s=60.0)
    played_all = played(args, *samples_of("taskset:products"))
    assert [(one.reward, one.status) for (one,) in played_all] == [(1.0, Sample.Status.COMPLETED)] * 4
    (sample,) = played_all[3]
    assert sample.response == "39<|im_end|>" and sample.loss_mask == [1] * sample.response_length
    assert sample.metadata["metrics"] == {"turns": 1} and sample.metadata["source_name"] == "products"
    assert len(engine.payloads) == 4


def test_limits_truncate(stand_in, talk):
    args, _ = talk(multiply, taskset_timeout_s=60.0, rollout_max_turns=2)
    [long] = played(args, samples_of("taskset:products?kind=long")[0])
    assert {one.status for one in long} == {Sample.Status.TRUNCATED} and long[0].reward == 1.0


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("kind=broken", "TaskError: no chair"),
        ("kind=hang", "the task did not end within 2 s"),
        ("kind=crash", "the process of verifiers has ended"),
        ("agent.harness.id=bash&agent.runtime.type=subprocess", "'bash' would run what the policy wrote"),
    ],
)
def test_a_task_that_fails_costs_its_sample_and_the_next_is_played(stand_in, talk, query, message):
    args, _ = talk(multiply, taskset_timeout_s=2.0)
    [lost] = played(args, samples_of(f"taskset:products?{query}")[0])
    assert lost.status is Sample.Status.FAILED and lost.remove_sample and message in lost.metadata["reward_error"]
    [[kept]] = played(args, samples_of("taskset:products")[2])
    assert kept.status is Sample.Status.COMPLETED and kept.reward == 1.0


def test_the_interpreter_is_asked_for_before_the_run(monkeypatch, args_of):
    monkeypatch.delenv("SLIME_AGENT_VERIFIERS_PYTHON", raising=False)
    args = args_of(prompt_data="taskset:products")
    derive_verifiers(args)
    assert args.custom_generate_function_path == "slime.ext.agent.tasksets.generate"
    (problem,) = check_verifiers(args)
    assert "SLIME_AGENT_VERIFIERS_PYTHON" in problem
    with pytest.raises(ConfigError, match="SLIME_AGENT_VERIFIERS_PYTHON"):
        samples_of("taskset:products")


@pytest.fixture
def args_of():
    from argparse import Namespace

    def make(prompt_data):
        sources = [{"path": prompt_data}]
        return Namespace(
            prompt_data=prompt_data,
            prompt_sources=sources,
            prompt_readers={},
            runs_here=True,
            custom_generate_function_path=None,
        )

    return make


@pytest.mark.skipif(not REAL, reason="SLIME_TEST_VERIFIERS_PYTHON names no Python with verifiers")
def test_the_package_plays_by_its_own_chat_program(tmp_path, monkeypatch, talk):
    (tmp_path / "products_for_tests.py").write_text(PACKAGE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLIME_AGENT_VERIFIERS_PYTHON", REAL)
    args, _ = talk(multiply, taskset_timeout_s=250.0)
    path = "taskset:products-for-tests?agent.harness.id=null&agent.runtime.type=subprocess"
    samples = samples_of(path)
    assert len(samples) == 4 and samples[1].prompt == [{"role": "user", "content": "1*13"}]
    lists = played(args, *samples[:2])
    assert [(one.reward, one.status) for (one,) in lists] == [(1.0, Sample.Status.COMPLETED)] * 2
