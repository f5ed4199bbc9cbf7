"""A carrier added in one file: the push does not know it, and the engines hold the bytes."""

from __future__ import annotations

import socket
import threading
from typing import Any

import pytest
import torch

from slime.ext.fast_push.acknowledgements import DigestedBuckets
from slime.ext.fast_push.gathered_buckets import plan_buckets
from slime.ext.fast_push.loaders import RECEIVER
from slime.ext.fast_push.manifest import Manifest
from slime.ext.fast_push.push import push_weights
from slime.utils.errors import EngineError, WeightSyncError
from slime.weights.push.engine import EngineProxy
from slime.weights.push.participants import Participants, PushClock
from slime.weights.push.state import Push, PushReport, TrainerRanks
from tests.ext.fast_push.dist.fault_engine import HoldingEngine
from tests.ext.fast_push.tcp import TcpCarrier, receive_from

TENSORS = {
    "norm": torch.randn(7), "up": torch.randn(33, 5), "down": torch.randn(5, 33, dtype=torch.bfloat16),
    "bias": torch.arange(3, dtype=torch.int64),
}  # fmt: skip


class Buckets:
    """All tensors, in as many buckets as a limit of 600 bytes makes."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors
        headers = [[(name, tuple(tensor.shape), tensor.dtype)] for name, tensor in tensors.items()]
        self.manifest = Manifest(*map(tuple, plan_buckets(headers, 600)))

    def iter_buckets(self, *, with_constants: bool = True) -> Any:
        for index, bucket in enumerate(self.manifest.buckets):
            flat = torch.zeros(bucket.num_bytes, dtype=torch.uint8)
            for piece in bucket.slices:
                data = self._tensors[piece.name].contiguous().view(-1).view(torch.uint8)
                flat[piece.offset : piece.offset + data.numel()] = data
            yield index, flat


class Answer:
    def __init__(self, value: Any, error: Exception | None) -> None:
        self._value, self._error = value, error

    def wait(self, timeout_s: float) -> Any:
        if self._error is not None:
            raise self._error
        return self._value


class TcpEngine(EngineProxy):
    """An engine that implements the verbs strictly, and has a socket for its buckets."""

    num_gpus, gpu_offset, is_colocated, loaders = 1, 0, False, (RECEIVER,)

    def __init__(self, index: int, fault: str = "") -> None:
        self.index, self.calls = index, []
        self.engine = HoldingEngine(
            {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}, 1, "0", fault
        )
        listener = socket.create_server(("127.0.0.1", 0))
        self.tcp_port = listener.getsockname()[1]
        load = lambda index, flat: self.engine.load(index, [flat], is_faulty=index == 1)  # noqa: E731
        threading.Thread(target=receive_from, args=(listener, load), daemon=True).start()

    def run(self, function: Any, /, *arguments: Any, on_all_nodes: bool = False) -> Answer:
        return self.start(function.__name__, *arguments)

    def start(self, method: str, /, *arguments: Any, **keywords: Any) -> Answer:
        self.calls.append(method)
        try:
            return Answer(getattr(self.engine, method)(*arguments, **keywords), None)
        except (WeightSyncError, EngineError) as error:
            return Answer(None, error)


def push(engines: list[TcpEngine], version: int = 1) -> PushReport:
    buckets = DigestedBuckets(Buckets(TENSORS))
    return push_weights(Push(str(version), Participants(engines, PushClock(20))), buckets, TcpCarrier(TrainerRanks()))


def assert_serves(engine: TcpEngine, version: str) -> None:
    assert engine.engine.version == version and not engine.engine.is_paused
    for name, tensor in TENSORS.items():
        assert torch.equal(engine.engine.held[0][name], tensor), name


def test_every_engine_serves_what_came_over_its_socket() -> None:
    engines = [TcpEngine(0), TcpEngine(1)]
    for version in (1, 2):
        report = push(engines, version)
        assert (report.num_engines, report.excluded) == (2, ())
        assert report.num_buckets > 2
        for engine in engines:
            assert_serves(engine, str(version))
    first, begin = ["pause_generation", "flush_cache"], ["begin_weight_update"]
    rest = ["acknowledge_weight_update", "commit_weight_update", "get_weight_version", "continue_generation"]
    assert engines[0].calls == [*first, *begin, *begin, *rest, *first, *begin, *rest]


@pytest.mark.parametrize("fault", ["corrupts receive", "loses receive"])
def test_an_engine_that_got_other_bytes_is_excluded_by_its_digest(fault: str) -> None:
    engines = [TcpEngine(0), TcpEngine(1, fault)]
    report = push(engines)
    assert [engine.index for engine in report.excluded] == [1]
    assert "for bucket 1" in report.excluded[0].reason
    assert_serves(engines[0], "1")
    assert engines[1].engine.is_paused


def test_an_engine_that_cannot_be_reached_is_excluded_and_when_no_other_is_left_the_push_fails() -> None:
    engines = [TcpEngine(0), TcpEngine(1)]
    with socket.create_server(("127.0.0.1", 0)) as closed:
        engines[1].tcp_port = closed.getsockname()[1]
    report = push(engines)
    assert "ConnectionRefusedError" in report.excluded[0].reason
    assert report.excluded[0].reason.endswith("(while connecting)")
    with pytest.raises(WeightSyncError, match=r"no engine took weight version 1 \(connecting to the engines\)"):
        push(engines[1:])
