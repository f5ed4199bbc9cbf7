"""The plain push of one rank to engines beside it: its order, and failing engines."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from slime.backends.megatron_utils.megatron_to_hf import HfForm
from slime.backends.megatron_utils.update_weight import plain_push
from slime.backends.megatron_utils.update_weight.plain_push import PlainPush
from slime.utils.errors import EngineError, WeightSyncError
from slime.weights.push.engine import EngineProxy
from slime.weights.push.participants import Participants, PushClock
from slime.weights.push.state import Push, TrainerRanks

TENSORS = {"norm": torch.randn(7), "up": torch.randn(33, 5), "down": torch.randn(5, 33, dtype=torch.bfloat16)}


class Weights:
    """All tensors; a bucket of 600 bytes holds one."""

    form, bucket_bytes = HfForm("qwen3", Namespace(has_query_latent=False), ""), 600  # type: ignore[arg-type]

    def whole_tensors(self, *, across_stages: bool) -> Iterator[tuple[str, torch.Tensor]]:
        assert across_stages
        return iter(TENSORS.items())

    def as_sent(self, name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        return [(name, tensor)]


class Answer:
    def __init__(self, value: Any) -> None:
        self._value = value

    def wait(self, timeout_s: float) -> Any:
        if isinstance(self._value, Exception):
            raise self._value
        return self._value


class Engine(EngineProxy):
    """Takes tensors as they are; refuses the request named ``fault``."""

    num_gpus, is_colocated, loaders = 1, True, ()

    def __init__(self, index: int, fault: str = "") -> None:
        self.index, self.gpu_offset, self.fault = index, 0, fault
        self.asked: list[str] = []
        self.held: dict[str, torch.Tensor] = {}
        self.version = "default"

    def start(self, method: str, /, *arguments: Any, **keywords: Any) -> Answer:
        self.asked.append(method)
        if method == self.fault:
            return Answer(EngineError("out of memory"))
        if method == "update_weights_from_tensor":
            self.handles = keywords["serialized_named_tensors"]
            bucket = self.handles[0]
            self.held |= {name: tensor.clone() for name, tensor in bucket}
            self.version = keywords["weight_version"]
        return Answer(self.version if method == "get_weight_version" else None)

    def run(self, function: Callable[..., Any], /, *arguments: Any, on_all_nodes: bool = False) -> Answer:
        raise AssertionError("the plain push knows no request of an extension")


@pytest.fixture(autouse=True)
def stock_wire(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_push.sglang, "prepare", lambda: None)
    monkeypatch.setattr(plain_push.sglang, "serialize_bucket", lambda bucket: (bucket, torch.empty(0)))


def push(*engines: Engine, **what: Any) -> Push:
    transport, made = PlainPush(TrainerRanks()), Push("3", Participants(engines, PushClock(20)), **what)
    transport.connect(engines, weights=Weights())  # type: ignore[arg-type]
    transport.send(made)
    return made


def test_every_engine_serves_all_tensors_under_the_version() -> None:
    engines = [Engine(0), Engine(1)]
    push(*engines)
    for engine in engines:
        loads = ["update_weights_from_tensor"] * 3
        assert engine.asked == ["pause_generation", "flush_cache", *loads, "get_weight_version", "continue_generation"]
        assert engine.version == "3" and engine.held.keys() == TENSORS.keys()
        assert all(torch.equal(engine.held[name], tensor) for name, tensor in TENSORS.items())


@pytest.mark.parametrize("fault", ["pause_generation", "update_weights_from_tensor", "continue_generation"])
def test_one_engine_that_fails_fails_the_push_and_is_named(fault: str) -> None:
    engines = [Engine(0), Engine(1, fault)]
    with pytest.raises(WeightSyncError, match=r"version 3 was not pushed.* of engine 1: EngineError: out of memory"):
        push(*engines)
    served = [engine.index for engine in engines if "continue_generation" in engine.asked]
    assert served == ([0, 1] if fault == "continue_generation" else [])


def test_nothing_more_is_sent_after_a_failure() -> None:
    engines = [Engine(0), Engine(1, "update_weights_from_tensor")]
    with pytest.raises(WeightSyncError):
        push(*engines)
    assert engines[0].asked.count("update_weights_from_tensor") == 1


def test_weights_that_engines_repack_are_unpacked_before_and_packed_after() -> None:
    engine = Engine(0)
    push(engine, repacks=True)
    places = [index for index, method in enumerate(engine.asked) if method == "post_process_weights"]
    loads = [index for index, method in enumerate(engine.asked) if method == "update_weights_from_tensor"]
    assert places == [0, loads[0] - 1, loads[-1] + 1], "what it can, undo, redo"


def test_a_comparison_is_refused() -> None:
    engine = Engine(0)
    with pytest.raises(WeightSyncError, match="--check-weight-update-equal needs --weight-push verified"):
        push(engine, checks=True)
    assert engine.asked == []


class FirstOfTwo(TrainerRanks):
    """Rank 0 of two; the other rank, on the engine's second GPU, contributes the handle ``other``."""

    other = "its memory"

    def gather(self, own: Any) -> list[Any]:
        if isinstance(own, tuple):  # a barrier
            return [own, (None if self.other else "out of memory", {}, None)]
        return [own, own and self.other]

    def from_main(self, own: Any) -> Any:
        return own


@pytest.mark.parametrize("other", ["its memory", ""])
def test_each_gpu_of_an_engine_loads_from_the_rank_that_shares_it(other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FirstOfTwo, "other", other)
    engine = Engine(0)
    engine.num_gpus = 2
    transport = PlainPush(FirstOfTwo(world_size=2))
    made = Push("3", Participants([engine], PushClock(20)), FirstOfTwo(world_size=2))
    transport.connect([engine], weights=Weights())  # type: ignore[arg-type]
    if other:
        transport.send(made)
        assert engine.handles[1] == "its memory" and engine.held.keys() == TENSORS.keys()
    else:
        with pytest.raises(WeightSyncError, match="trainer rank 1 failed .*out of memory"):
            transport.send(made)
        assert "update_weights_from_tensor" not in engine.asked
