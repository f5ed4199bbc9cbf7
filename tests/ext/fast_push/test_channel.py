"""Members of a weight group get each other's bytes, and nobody waits for a member that does not come."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch

from slime.ext.fast_push import channel
from slime.ext.fast_push.channel import WeightChannel
from slime.utils.errors import WeightSyncError
from slime.utils.net import find_available_port


def members(
    work: Callable[[int, int], object], world_size: int = 3, missing: tuple[int, ...] = ()
) -> dict[int, object]:
    """Run ``work(rank, port)`` for every rank in a thread; return results or errors."""
    port = find_available_port(24000)
    results: dict[int, object] = {}

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank, port)
        except WeightSyncError as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size) if rank not in missing]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return results


def join(rank: int, port: int, timeout_s: float = 30.0, **options: object) -> WeightChannel:
    return WeightChannel("127.0.0.1", port, rank=rank, world_size=3, backend="gloo", timeout_s=timeout_s, **options)


def test_abandoning_frees_those_who_wait() -> None:
    all_joined = threading.Barrier(3)

    def work(rank: int, port: int) -> float:
        channel = join(rank, port)
        all_joined.wait(40)
        start = time.monotonic()
        if rank == 0:
            channel.abandon()
            return 0.0
        with pytest.raises(WeightSyncError, match="weight group"):
            channel.broadcast(torch.zeros(1000, dtype=torch.uint8))
        with pytest.raises(WeightSyncError, match=f"rank {rank} has left the weight group"):
            channel.start_broadcast(torch.zeros(8, dtype=torch.uint8))
        return time.monotonic() - start

    outcomes = members(work)
    assert all(isinstance(waited, float) and waited < 20 for waited in outcomes.values()), outcomes


def test_a_member_that_does_not_come_ends_the_joining_of_the_others_at_the_deadline() -> None:
    errors = members(lambda rank, port: join(rank, port, timeout_s=1.0), missing=(2,))
    assert "only 2 members joined" in str(errors[0])
    assert "--weight-update-timeout-s" in str(errors[1])


def test_a_member_does_not_wait_for_the_store_of_a_trainer_that_is_gone(monkeypatch) -> None:
    monkeypatch.setattr(channel, "STORE_TIMEOUT_S", 0.5)
    errors = members(lambda rank, port: join(rank, port, timeout_s=10_000.0), missing=(0, 2))
    assert "rank 1 of 3 could not join the weight group" in str(errors[1])


def test_the_trainer_can_call_the_joining_off() -> None:
    def work(rank: int, port: int) -> object:
        cancelled = threading.Event()
        threading.Timer(0.2, cancelled.set).start()
        return join(rank, port, **({"is_cancelled": cancelled.is_set} if rank == 0 else {}))

    errors = members(work, missing=(1,))
    assert all("abandoned the weight group before all had joined" in str(error) for error in errors.values())
