"""What keeps the client side of a rollout cheap: work done once a prompt, waves that start in pieces, traces."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from slime.rollout import data_source as data_source_module
from slime.rollout import pool, sglang_rollout
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.sglang_rollout import GenerateState, generate_rollout
from slime.utils.async_utils import run
from slime.utils.http_utils import close_http_client
from tests.scripted_engine.script import Script
from tests.scripted_engine.server import ScriptedEngine
from tests.unit.rollout import fake_cluster
from tests.unit.rollout.fake_cluster import FakeTokenizer, make_args, write_prompts


class CountingTokenizer(FakeTokenizer):
    def __init__(self) -> None:
        self.encoded: list[str] = []

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.encoded.append(text)
        return super().encode(text)


@pytest.fixture
def tokenizer(monkeypatch) -> Iterator[CountingTokenizer]:
    tokenizer = CountingTokenizer()
    for module in (sglang_rollout, data_source_module):
        monkeypatch.setattr(module, "load_tokenizer", lambda *a, **k: tokenizer)
        monkeypatch.setattr(module, "load_processor", lambda *a, **k: None)
    GenerateState.clear_instances()
    fake_cluster.CALLS.clear()
    yield tokenizer
    run(close_http_client())
    GenerateState.clear_instances()


@pytest.fixture
def engine() -> Iterator[ScriptedEngine]:
    with ScriptedEngine(Script(length=5)) as engine:
        yield engine


def rollout(engine: ScriptedEngine, tmp_path: Any, prompts: list[str], **flags: Any) -> list[Any]:
    flags = {"rollout_batch_size": len(prompts), "over_sampling_batch_size": len(prompts)} | flags
    args = make_args(engine.port, prompt_data=write_prompts(tmp_path / "prompts.jsonl", prompts), **flags)
    return generate_rollout(args, 0, RolloutDataSourceWithBuffer(args)).samples


def test_every_sample_tells_its_spans_from_the_inside_out(tokenizer, engine, tmp_path):
    (group,) = rollout(engine, tmp_path, ["a"], n_samples_per_prompt=2)
    for sample in group:
        ends = [event for event in sample.trace["events"] if event["type"] == "span_end"]
        names = [event["name"] for event in ends]
        assert names == ["sglang_generate", "reward_model", "generate_and_rm", "generate_and_rm_group"]
        ids = {event["name"]: event["span_id"] for event in ends}
        assert ends[0]["parent_span_id"] == ends[1]["parent_span_id"] == ids["generate_and_rm"]
        assert ends[2]["parent_span_id"] == ids["generate_and_rm_group"]
        assert ends[0]["attrs"]["completion_tokens"] == 5 and ends[0]["attrs"]["finish_reason"] == "stop"
    assert group[0].trace["trace_id"] != group[1].trace["trace_id"]


def test_a_wave_starts_in_pieces_between_which_other_work_is_done(tokenizer, engine, tmp_path, monkeypatch):
    monkeypatch.setattr(pool, "STARTED_AT_ONCE", 4)
    started: list[int] = []
    running: list[int] = []
    start_group = GenerateState.start_group

    def recording(self: GenerateState, call: Any) -> Any:
        started.append(len(started))
        asyncio.get_running_loop().call_soon(lambda: running.append(len(started)))
        return start_group(self, call)

    monkeypatch.setattr(GenerateState, "start_group", recording)
    rollout(engine, tmp_path, list("abcdef"), n_samples_per_prompt=2)
    assert running == [2, 2, 4, 4, 6, 6]
