"""The engine object's own decisions, against a server that only records."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from array import array
from collections.abc import AsyncIterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slime.backends.sglang_utils import cpu_shim, sglang_engine, sglang_plugin
from slime.backends.sglang_utils.sglang_engine import SGLangEngine
from slime.observability.trace_utils import build_sglang_meta_trace_attrs
from slime.utils.errors import DataError, DeadlineError


class NotingServer:
    def __init__(self) -> None:
        self.url = "http://engine"
        self.asked: list[tuple[str, str, Any]] = []
        self.answers: dict[str, Any] = {}

    def request(self, method: str, path: str, *, timeout_s: float, json: Any = None) -> Any:
        self.asked.append((method, path, json))
        return self.answers.get(path)

    def get(self, path: str, **_: Any) -> Any:
        return self.request("GET", path, timeout_s=1)


@pytest.fixture
def engine():
    return make_engine()


def make_engine(rank: int = 0, num_gpus_per_engine: int = 1) -> SGLangEngine:
    args = Namespace(
        rollout_num_gpus_per_engine=num_gpus_per_engine,
        num_gpus_per_node=8,
        hf_checkpoint="/hf",
        weight_update_timeout_s=60,
    )
    engine = SGLangEngine(args, rank=rank)
    engine.server = NotingServer()  # type: ignore[assignment]
    return engine


def test_releasing_flushes_first_and_never_releases_twice(engine):
    engine.release_memory_occupation(["weights"])
    engine.release_memory_occupation()
    engine.release_memory_occupation()
    assert engine.server.asked == [
        ("GET", "/flush_cache", None),
        ("POST", "/release_memory_occupation", {"tags": ["weights"]}),
        ("GET", "/flush_cache", None),
        ("POST", "/release_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]}),
        ("GET", "/flush_cache", None),
    ]


def test_an_update_sends_what_was_given_and_nothing_else(engine):
    engine.update_weights_from_tensor(["s"], "flattened_bucket", "4")
    engine.update_weights_from_distributed(["a"], ["torch.bfloat16"], [(2, 3)], "g", "5")
    engine.update_weights_from_disk("/hf2", "6")
    assert [payload for _, _, payload in engine.server.asked] == [
        {
            "serialized_named_tensors": ["s"],
            "flush_cache": False,
            "load_format": "flattened_bucket",
            "weight_version": "4",
        },
        {
            "names": ["a"],
            "dtypes": ["bfloat16"],
            "shapes": [[2, 3]],
            "group_name": "g",
            "flush_cache": False,
            "weight_version": "5",
        },
        {"model_path": "/hf2", "weight_version": "6"},
    ]


def test_an_engine_whose_model_differs_from_its_digests_is_ended(engine, monkeypatch):
    monkeypatch.setattr(sglang_engine, "wait_until_healthy", lambda *unused, timeout_s: None)
    stopped = []
    engine.process = Namespace(stop=lambda: stopped.append(True))
    engine._check = Future()
    with pytest.raises(DeadlineError, match="/hf are not compared with their digests after 0.01 s"):
        engine.wait_ready(0.01)
    engine._check.set_exception(DataError("model-1.safetensors is damaged"))
    with pytest.raises(DataError, match="is damaged"):
        engine.wait_ready(1)
    assert stopped == [True, True] and engine.server.asked == []


def test_every_answer_names_its_engine():
    cpu_shim.install()
    from sglang.srt.managers.io_struct import GenerateReqInput

    settings = SimpleNamespace(
        enable_lora=False, enable_mis=False, tokenizer_metrics_allowed_custom_labels=None, host="10.0.0.7", port=15000
    )

    async def answers(manager: Any, obj: Any, request: Any) -> AsyncIterator[dict[str, Any]]:
        yield {"meta_info": {"id": obj.rid}}

    async def ask() -> list[Any]:
        manager = SimpleNamespace(server_args=settings)
        obj = GenerateReqInput(input_ids=[5], rid="1")
        return [one async for one in sglang_plugin._generate(answers, manager, obj)]

    (answer,) = asyncio.run(ask())
    attrs = build_sglang_meta_trace_attrs(answer["meta_info"])
    assert attrs["engine"] == "10.0.0.7:15000"


def test_ids_with_images_reach_the_join_with_an_encoders_features_and_texts_stay():
    waiting = [
        SimpleNamespace(need_wait_for_mm_inputs=True, input_text=None, input_ids=array("q", [5, 6])),
        SimpleNamespace(need_wait_for_mm_inputs=True, input_text="a", input_ids=array("q", [7])),
        SimpleNamespace(need_wait_for_mm_inputs=False, input_text=None, input_ids=array("q", [8])),
        SimpleNamespace(),  # not a generation request
    ]
    seen = sglang_plugin._receive_images(lambda *values: values, "receiver", waiting, "class")
    assert seen == ("receiver", waiting, "class")
    assert [getattr(request, "input_text", 0) for request in waiting] == [[5, 6], "a", None, 0]


def test_a_flush_forgets_the_features_of_images():
    cpu_shim.install()
    from sglang.srt.managers import mm_utils
    from sglang.srt.mem_cache.multimodal_cache import EmbeddingResult

    mm_utils.init_mm_embedding_cache(1 << 20)
    mm_utils.embedding_cache.set(5, EmbeddingResult(embedding=torch.ones(2, 3)))
    sglang_plugin._forget_images(False, None)
    assert mm_utils.embedding_cache.get_single(5) is not None
    sglang_plugin._forget_images(True, None)
    assert mm_utils.embedding_cache.get_single(5) is None and len(mm_utils.embedding_cache) == 0
    mm_utils.embedding_cache = None
    sglang_plugin._forget_images(True, None)  # a text model
