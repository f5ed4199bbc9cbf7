"""The push of an adapter alone: what each engine is sent, and what is told of it."""

from __future__ import annotations

import base64
import pickle
from typing import Any

import pytest
import torch

from slime.utils.errors import EngineError, WeightSyncError
from slime.weights.push import adapter
from slime.weights.push.adapter import Shapes, named_parts, push_adapter
from slime.weights.push.participants import Participants, PushClock
from slime.weights.push.state import Push, TrainerRanks

TENSORS = {
    "base_model.model.q_proj.lora_A.weight": torch.arange(6.0).view(2, 3),
    "base_model.model.q_proj.lora_B.weight": torch.arange(8.0).view(2, 4).t(),
}


class Engine:
    def __init__(self, index: int, gpu_offset: int, *, is_colocated: bool = True, error: Exception | None = None):
        self.index, self.gpu_offset, self.is_colocated, self.error = index, gpu_offset, is_colocated, error
        self.num_gpus = 1
        self.loaded: tuple[Any, ...] = ()

    def load_adapter(self, *loaded: Any) -> Engine:
        self.loaded = loaded
        return self

    def wait(self, timeout_s: float) -> None:
        if self.error:
            raise self.error


class Wire:
    def prepare(self) -> None:
        pass


class OnCard(torch.Tensor):
    """A tensor that says that it is not on the host, and is."""

    is_cpu = False

    def cpu(self, *_: Any) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


@pytest.fixture(autouse=True)
def handles(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.Tensor, Shapes]]:
    """What handles were made of, in turn."""
    made: list[tuple[torch.Tensor, Shapes]] = []

    def handle_of(content: tuple[torch.Tensor, Shapes]) -> str:
        assert torch.multiprocessing.get_sharing_strategy() == "file_system"
        made.append(content)
        return f"handle to memory of the {'host' if content[0].is_cpu else 'card'}"

    monkeypatch.setattr(adapter, "handle_of", handle_of)
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
    """Its GPUs of another host cannot open memory of this one."""
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
