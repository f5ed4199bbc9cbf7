"""NCCL communicators that are released and recreated behind groups that everyone holds."""

from __future__ import annotations

import os
import tempfile
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from slime.backends.megatron_utils import cpu_platform  # noqa: F401

# isort: split
from megatron.core import mpu

from slime.backends.megatron_utils.reloadable_groups import (
    make_groups_reloadable,
    plain_group,
    release_communicators,
)

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
MIB = 2**20


def free_bytes() -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def use_everything(rank: int, size: int) -> None:
    """Collectives over several groups, objects, a coalesced pair, and messages to the neighbor."""
    for group in (mpu.get_tensor_model_parallel_group(), mpu.get_model_parallel_group(), None):
        value = torch.full((4,), float(rank + 1), device="cuda")
        dist.all_reduce(value, group=group)
        assert value.tolist() == [size * (size + 1) / 2] * 4
        objects: list[Any] = [None] * size
        dist.all_gather_object(objects, rank, group=group)
        assert objects == list(range(size))
        parts = torch.empty(2, device="cuda")
        with dist._coalescing_manager(group=group, async_ops=True) as work:
            dist.reduce_scatter_tensor(parts, torch.ones(2 * size, device="cuda"), group=group)
        work.wait()
        assert parts.tolist() == [size] * 2
    if size > 1:
        group = plain_group(mpu.get_tensor_model_parallel_group())
        received = torch.empty(1 << 20, device="cuda")
        neighbour = (rank + 1) % size
        sent = torch.full_like(received, rank)
        ops = [dist.P2POp(dist.isend, sent, neighbour, group), dist.P2POp(dist.irecv, received, neighbour, group)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        assert received[-1].item() == neighbour


def release_and_use_again(rank: int, size: int, store: str, results: Any) -> None:
    try:
        if torch.cuda.device_count() < size:
            os.environ["NCCL_HOSTID"] = str(rank)  # makes NCCL treat two ranks on one GPU as two hosts
        torch.cuda.set_device(rank % torch.cuda.device_count())
        dist.init_process_group("nccl", init_method=f"file://{store}", world_size=size, rank=rank)
        mpu.initialize_model_parallel(tensor_model_parallel_size=size)
        held = mpu.get_tensor_model_parallel_group()
        assert make_groups_reloadable() > 3 and make_groups_reloadable() == 0
        assert mpu.get_tensor_model_parallel_group() is not held
        freed = []
        for _ in range(3):
            use_everything(rank, size)
            before = free_bytes()
            release_communicators()
            freed.append((free_bytes() - before) / MIB)
        use_everything(rank, size)
        dist.destroy_process_group()
        results.put((rank, freed, None))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
        raise


def run(size: int) -> list[list[float]]:
    """MiB that each release freed, by rank."""
    context = mp.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        processes = [
            context.Process(target=release_and_use_again, args=(rank, size, store, results)) for rank in range(size)
        ]
        for process in processes:
            process.start()
        outcome = {}
        try:
            for _ in range(size):
                rank, freed, error = results.get(timeout=240)
                assert error is None, error
                outcome[rank] = freed
        finally:
            for process in processes:
                process.join(timeout=20)
                if process.is_alive():
                    process.kill()
    print(f"{size} ranks: MiB given back by each release: {outcome}")
    return list(outcome.values())


@needs_cuda
@pytest.mark.gpu(1)
def test_one_rank_gives_its_communicators_back_and_goes_on():
    assert all(freed > 100 for releases in run(1) for freed in releases)


@needs_cuda
@pytest.mark.gpu(1)
def test_two_ranks_give_their_communicators_back_and_go_on():
    releases = run(2)
    if torch.cuda.device_count() > 1:  # otherwise ranks share the GPU, and most buffers are in host memory
        assert all(freed > 100 for rank in releases for freed in rank)
