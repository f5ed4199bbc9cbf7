"""Adapter pushes: what each engine receives, and what is logged."""

from __future__ import annotations

import base64
import pickle
from concurrent.futures import Future, wait
from contextlib import nullcontext
from threading import Event, Timer
from typing import Any

import pytest
import torch

from slime.backends.sglang_utils.server_control import NoAnswer, Refused
from slime.ext.lora import engine_adapters
from slime.ext.lora.engine_adapters import (
    IN_ONE_BUFFER,
    Shapes,
    load_adapter,
    named_parts,
    push_adapter,
    served_adapters,
)
from slime.utils.errors import EngineError, WeightSyncError
from slime.weights.push.engine import EngineProxy
from slime.weights.push.participants import Participants, PushClock
from slime.weights.push.state import Push, TrainerRanks
from tests.unit.backends.sglang_utils.test_sglang_engine import NotingServer, make_engine

TENSORS = {
    "base_model.model.q_proj.lora_A.weight": torch.arange(6.0).view(2, 3),
    "base_model.model.q_proj.lora_B.weight": torch.arange(8.0).view(2, 4).t(),
}


class Engine:
    gpus = EngineProxy.gpus

    def __init__(self, index: int, gpu_offset: int, *, is_colocated: bool = True, error: Exception | None = None):
        self.index, self.gpu_offset, self.is_colocated, self.error = index, gpu_offset, is_colocated, error
        self.num_gpus = 1
        self.loaded: tuple[Any, ...] = ()

    def run(self, verb: Any, *loaded: Any) -> Engine:
        assert verb is load_adapter
        self.loaded = loaded
        return self

    def wait(self, timeout_s: float) -> None:
        if self.error:
            raise self.error


class Wire:
    def prepare(self) -> None:
        pass


class OnCard(torch.Tensor):
    """A host tensor that claims to be on a GPU."""

    is_cpu = False

    def cpu(self, *_: Any) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


@pytest.fixture(autouse=True)
def handles(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.Tensor, Shapes]]:
    """The tensors of which handles were made, in order."""
    made: list[tuple[torch.Tensor, Shapes]] = []

    def handle_of(content: tuple[torch.Tensor, Shapes]) -> str:
        assert torch.multiprocessing.get_sharing_strategy() == "file_system"
        made.append(content)
        return f"handle to memory of the {'host' if content[0].is_cpu else 'card'}"

    monkeypatch.setattr(engine_adapters, "handle_of", handle_of)
    return made


def push(*engines: Engine, tensors: dict[str, torch.Tensor] = TENSORS, dtype: torch.dtype = torch.float32) -> Any:
    push = Push("7", Participants(engines, PushClock(10)), TrainerRanks(ranks_per_host=8))
    return push_adapter(push, tensors, dtype, {"r": 2}, Wire().prepare)


def test_engines_of_rank_0s_host_get_a_handle_and_others_the_values(
    handles: list[tuple[torch.Tensor, Shapes]],
) -> None:
    strategy = torch.multiprocessing.get_sharing_strategy()
    near, far, apart = Engine(0, 0), Engine(1, 8), Engine(2, 0, is_colocated=False)
    report = push(near, far, apart)
    assert near.loaded == ("7", {"r": 2}, "handle to memory of the host", True)
    sent = [named_parts(*handles[0])]
    for engine in (far, apart):
        *told, text, is_handle = engine.loaded
        assert told == ["7", {"r": 2}] and not is_handle
        sent.append(pickle.loads(base64.b64decode(text)))
        assert all(one.untyped_storage().nbytes() == one.nbytes for one in sent[-1].values())
    for tensors in sent:
        assert list(tensors) == list(TENSORS) and all(tensors[name].equal(TENSORS[name]) for name in TENSORS)
    assert (report.version, report.num_tensors, report.num_bytes, report.num_engines) == (7, 2, 56, 3)
    assert torch.multiprocessing.get_sharing_strategy() == strategy


def test_an_engine_that_reaches_beyond_rank_0s_host_gets_the_values() -> None:
    """The engine's GPUs on another host cannot open this host's memory."""
    within, across = Engine(0, 4), Engine(1, 4)
    within.num_gpus, across.num_gpus = 4, 8
    push(within, across)
    assert within.loaded[3] is True and across.loaded[3] is False


def test_an_engine_that_refuses_is_excluded_and_the_last_one_ends_the_push() -> None:
    good, bad = Engine(0, 0), Engine(1, 1, error=EngineError("rank 64 is above 32"))
    assert [(one.index, one.reason) for one in push(good, bad).excluded] == [
        (1, "EngineError: rank 64 is above 32 (while loading the adapter)")
    ]
    with pytest.raises(WeightSyncError, match="no engine took weight version 7 .*rank 64 is above 32"):
        push(bad)


def test_an_engine_that_has_rank_0s_gpu_alone_gets_a_handle_to_memory_of_it() -> None:
    alone, beside, wider = Engine(0, 0), Engine(1, 1), Engine(2, 0)
    wider.num_gpus = 2
    push(alone, beside, wider, tensors={name: tensor.as_subclass(OnCard) for name, tensor in TENSORS.items()})
    assert [engine.loaded[2].split()[-1] for engine in (alone, beside, wider)] == ["card", "host", "host"]
    assert alone.loaded[3] is True


def test_engines_get_the_pushed_dtype(handles: list[tuple[torch.Tensor, Shapes]]) -> None:
    report = push(Engine(0, 0), dtype=torch.bfloat16)
    sent = named_parts(*handles[0])
    assert all(sent[name].equal(TENSORS[name].bfloat16()) for name in TENSORS)
    assert report.num_bytes == 28


@pytest.fixture
def engine() -> Any:
    return make_engine()


def asked_of_adapters(engine):
    return [(path.rpartition("/")[2], json["lora_name"]) for _, path, json in engine.server.asked]


def test_an_engine_holds_two_adapters_in_turn(engine):
    for version in ("1", "2", "2", "3", "4"):
        load_adapter(engine, version, {"r": 2}, "tensors", version == "4")
        wait([served_adapters(engine).unloading] if served_adapters(engine).unloading else [])
    load, unload = "load_lora_adapter_from_tensors", "unload_lora_adapter"
    assert asked_of_adapters(engine) == [  # once for version 2: this engine did not miss the resend
        (load, "slime-1"),
        *[(load, "slime-2"), (unload, "slime-1")],
        *[(load, "slime-3"), (unload, "slime-2")],
        *[(load, "slime-4"), (unload, "slime-3")],
    ]
    sent = engine.server.asked[-2][2]
    assert sent["serialized_tensors"] == "tensors" and sent["config_dict"] == {"r": 2}
    assert sent["load_format"] == IN_ONE_BUFFER and "load_format" not in engine.server.asked[0][2]


def test_a_push_does_not_wait_for_an_old_adapters_requests_and_the_next_one_does(engine, monkeypatch):
    request, have_ended = engine.server.request, Event()

    def slow(method: str, path: str, **options: Any) -> Any:
        if path == "/unload_lora_adapter":
            assert have_ended.wait(20)
        return request(method, path, **options)

    monkeypatch.setattr(engine.server, "request", slow)
    for version in ("1", "2"):
        load_adapter(engine, version, {}, "tensors", False)
    assert not served_adapters(engine).unloading.done()
    Timer(0.2, have_ended.set).start()
    load_adapter(engine, "3", {}, "tensors", False)
    asked = asked_of_adapters(engine)
    assert asked.index(("unload_lora_adapter", "slime-1")) < asked.index(("load_lora_adapter_from_tensors", "slime-3"))


@pytest.mark.parametrize("error", [NoAnswer("not within 60 s"), Refused("no such adapter", 400)])
def test_an_old_adapter_that_does_not_go_in_time_leaves_the_wait_to_sglang_and_other_errors_are_raised(engine, error):
    load_adapter(engine, "1", {}, "tensors", False)
    served_adapters(engine).unloading = Future()
    served_adapters(engine).unloading.set_exception(error)
    with nullcontext() if isinstance(error, NoAnswer) else pytest.raises(Refused, match="no such adapter"):
        load_adapter(engine, "2", {}, "tensors", False)
    load_adapter(engine, "2", {}, "tensors", False)  # as a resend does
    assert [name for _, name in asked_of_adapters(engine)] == ["slime-1", "slime-2", "slime-1"]


def test_a_server_that_was_started_again_gets_the_adapter_again(engine: Any) -> None:
    load_adapter(engine, "1", {}, "tensors", False)
    engine.server = NotingServer()
    load_adapter(engine, "1", {}, "tensors", False)
    assert asked_of_adapters(engine) == [("load_lora_adapter_from_tensors", "slime-1")]
