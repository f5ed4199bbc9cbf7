"""An engine that talks, in front of the tiny tokenizer, for the generate functions of examples/."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from examples.tiny_arithmetic.tokenizer import build_tokenizer
from slime.rollout.sglang_rollout import GenerateState
from slime.utils.types import Sample
from tests.unit.talking_engine import TalkingEngine

Talk = Callable[..., tuple[Namespace, TalkingEngine]]


@pytest.fixture
def talk(tmp_path) -> Iterator[Talk]:
    """``talk(policy, script={...}, **attributes)`` gives args and an engine that answers by ``policy``."""
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
            "rollout_num_gpus_per_engine": 1,
            "rollout_temperature": 1.0,
            "rollout_top_p": 1.0,
            "rollout_top_k": -1,
            "rollout_max_response_len": 300,
            "rollout_max_context_len": None,
            "eval_max_context_len": None,
            "rollout_stop": None,
            "rollout_stop_token_ids": None,
            "rollout_skip_special_tokens": False,
            "sglang_enable_deterministic_inference": False,
            "partial_rollout": False,
            "mask_offpolicy_in_partial_rollout": False,
            "group_rm": False,
            "unsafe_local_sandbox": False,
            "custom_generate_function_path": None,
            "custom_rm_path": None,
            "rollout_seed": 0,
            "n_samples_per_prompt": 1,
            "sglang_dp_size": 1,
            "reward_key": None,
            "grpo_std_normalization": True,
        }
        return Namespace(**(values | attributes)), engine

    yield start
    for engine in engines:
        engine.stop()
    GenerateState.clear_instances()


@pytest.fixture
def ask() -> Callable[..., Sample]:
    """``ask(question, **fields)``: a sample whose prompt is the question, rendered."""

    def make(question: str, **fields: Any) -> Sample:
        prompt = build_tokenizer().apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        return Sample(**({"index": 3, "group_index": 1, "prompt": prompt} | fields))

    return make
