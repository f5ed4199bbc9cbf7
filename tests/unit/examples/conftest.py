"""A scripted engine with the tiny tokenizer, for the generate functions of examples/."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from examples.tiny_arithmetic.tokenizer import build_tokenizer
from slime.rollout.sglang_rollout import GenerateState
from slime.utils.types import Sample
from tests.flag_values import args_with
from tests.unit.talking_engine import TalkingEngine

Talk = Callable[..., tuple[Namespace, TalkingEngine]]


@pytest.fixture
def talk(tmp_path) -> Iterator[Talk]:
    """``talk(policy, script={...}, **attributes)`` returns args and an engine that answers by ``policy``."""
    build_tokenizer().save_pretrained(tmp_path / "hf")
    engines = []
    GenerateState.clear_instances()

    def start(policy: Callable[[str], str], *, script: dict[str, Any] | None = None, **attributes: Any) -> Any:
        engine = TalkingEngine(build_tokenizer(), policy, **(script or {}))
        engine.start()
        engines.append(engine)
        values = {
            "hf_checkpoint": str(tmp_path / "hf"),
            "sglang_router_ip": "127.0.0.1",
            "sglang_router_port": engine.port,
            "sglang_server_concurrency": 8,
            "rollout_num_gpus": 1,
            "rollout_max_response_len": 300,
            "sglang_enable_deterministic_inference": False,
            "rollout_seed": 0,
            "sglang_dp_size": 1,
        }
        return args_with(**(values | attributes)), engine

    yield start
    for engine in engines:
        engine.stop()
    GenerateState.clear_instances()


@pytest.fixture
def ask() -> Callable[..., Sample]:
    """``ask(question, **fields)``: a sample whose prompt is the rendered question."""

    def make(question: str, **fields: Any) -> Sample:
        prompt = build_tokenizer().apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        return Sample(**({"index": 3, "group_index": 1, "prompt": prompt} | fields))

    return make
