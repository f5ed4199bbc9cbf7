"""SGLang's update group over NCCL, between two processes on one GPU: a failing engine does not block the trainer.

NCCL accepts two ranks on one GPU if they appear to be on two hosts, and then uses sockets.
"""

from __future__ import annotations

import time
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from slime.backends.megatron_utils import sglang
from slime.backends.megatron_utils.update_weight.engine_group import EngineGroup
from slime.utils.errors import EngineError
from slime.utils.net import format_host_port
from slime.weights.push.participants import Participants, PushClock

pytestmark = [
    pytest.mark.gpu(1),
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

SIZE = 2**24
TIMEOUT_S = 20.0


def serve(host: str, answers: Connection) -> None:
    """An engine without our loader: joins, takes part in broadcasts, or refuses to."""
    use_hosts(host)
    torch.cuda.set_device(0)
    groups: dict[str, Any] = {}
    while True:
        verb, arguments = answers.recv()
        if verb == "join":
            address, port, offset, world_size, name, backend = arguments
            groups[name] = sglang._sglang()[1](
                backend=backend, init_method=f"tcp://{format_host_port(address, port)}", world_size=world_size,
                rank=offset, group_name=name, timeout=timedelta(seconds=TIMEOUT_S),
            )  # fmt: skip
            answers.send(None)
        elif verb == "load":
            received = torch.zeros(SIZE, device="cuda")
            dist.broadcast(received, 0, group=groups[arguments["group_name"]])
            answers.send(received.sum().item())
        else:
            answers.send(EngineError("no room for this bucket"))


def use_hosts(name: str) -> None:
    """Make NCCL see this process on a host of that name."""
    import os

    os.environ |= {"NCCL_HOSTID": name, "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_CUMEM_ENABLE": "0"}


class Engine:
    """The trainer's end of an engine; ``breaks`` says whether it refuses the next bucket."""

    index, num_gpus = 0, 1

    def __init__(self) -> None:
        context = mp.get_context("spawn")
        self._connection, other = context.Pipe()
        self.process = context.Process(target=serve, args=("engine", other), daemon=True)
        self.process.start()
        self.breaks = False

    def init_weights_update_group(self, *place: Any) -> Engine:
        self._connection.send(("join", place))
        return self

    def update_weights_from_distributed(self, **bucket: Any) -> Engine:
        self._connection.send(("refuse" if self.breaks else "load", bucket))
        return self

    def wait(self, timeout_s: float) -> Any:
        if not self._connection.poll(timeout_s):
            raise EngineError("no answer")
        answer = self._connection.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.mark.parametrize("good", [0, 2], ids=["in-the-first-bucket", "later"])
def test_an_engine_that_breaks_the_group_sets_the_trainer_free_and_the_next_group_works(
    good: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang, "flatten", lambda bucket: torch.cat([tensor for _, tensor in bucket]))
    use_hosts("trainer")
    torch.cuda.set_device(0)
    engines, group = [Engine(), Engine()], EngineGroup("slime")  # type: ignore[arg-type]
    bucket = [("x", torch.ones(SIZE, device="cuda"))]
    try:
        for engine, buckets in zip(engines, (good, 1), strict=True):
            participants = Participants([engine], PushClock(2 * TIMEOUT_S))  # type: ignore[list-item]
            group.form([engine], participants)  # type: ignore[list-item]
            for _ in range(buckets):
                group.broadcast(bucket, "1", participants)
            assert not participants.reasons
            if engine is engines[0]:
                engine.breaks = True
                began_s = time.monotonic()
                group.broadcast(bucket, "1", participants)
                assert "no room for this bucket" in participants.reasons[0]
                torch.cuda.synchronize()  # a pending broadcast would block the GPU
                assert time.monotonic() - began_s < TIMEOUT_S
                assert bucket[0][1].sum().item() == SIZE
    finally:
        for engine in engines:
            engine.process.kill()
            engine.process.join()
