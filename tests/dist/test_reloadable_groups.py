"""Groups that release their connections: holders keep their objects, and every kind of call works afterwards."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.matrix.pool import run_ranks

pytestmark = pytest.mark.dist


def call_everything(group: Any, rank: int) -> None:
    """One call of each kind that the trainer makes."""
    mine = torch.full((3,), rank + 1.0)
    dist.all_reduce(total := mine.clone(), group=group)
    assert total.tolist() == [3.0] * 3
    objects: list[Any] = [None, None]
    dist.all_gather_object(objects, rank, group=group)
    assert objects == [0, 1]
    dist.all_gather_into_tensor(both := torch.empty(6), mine, group=group)
    assert both.tolist() == [1.0] * 3 + [2.0] * 3
    dist.broadcast(sent := torch.full((2,), float(rank)), 1, group=group)
    assert sent.tolist() == [1.0] * 2
    dist.all_to_all_single(exchanged := torch.empty(2), torch.tensor([10.0 * rank, 10.0 * rank + 1]), group=group)
    assert exchanged.tolist() == [rank, 10.0 + rank]
    part = torch.empty(2)
    with dist._coalescing_manager(group=group, async_ops=True) as work:
        dist.reduce_scatter_tensor(part, torch.ones(4), group=group)
    work.wait()
    assert part.tolist() == [2.0] * 2
    received = torch.empty(3)
    ops = [dist.P2POp(dist.isend, mine, 1 - rank, group), dist.P2POp(dist.irecv, received, 1 - rank, group)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert received.tolist() == [2.0 - rank] * 3
    dist.barrier(group=group)
    assert dist.get_rank(group) == rank and dist.get_world_size(group) == 2
    assert dist.get_process_group_ranks(group if group is not None else dist.group.WORLD) == [0, 1]


def release_twice() -> int:
    from slime.backends.megatron_utils import cpu_platform  # noqa: F401

    # isort: split
    from megatron.core import mpu

    from slime.backends.megatron_utils.reloadable_groups import (
        ReloadableProcessGroup,
        make_groups_reloadable,
        plain_group,
        release_communicators,
    )

    warnings.simplefilter("ignore")
    rank = dist.get_rank()
    calls: list[int] = []
    release_communicators(meanwhile=lambda: calls.append(0))  # nothing to release yet
    mpu.initialize_model_parallel(tensor_model_parallel_size=2, create_gloo_process_groups=False)
    count = make_groups_reloadable("gloo")
    assert make_groups_reloadable("gloo") == 0
    groups = [mpu.get_tensor_model_parallel_group(), mpu.get_model_parallel_group()]
    assert all(isinstance(group, ReloadableProcessGroup) for group in groups)
    assert mpu.get_pipeline_model_parallel_group().size() == 1
    for _ in range(3):
        for group in (*groups, None):
            call_everything(group, rank)
        call_everything(plain_group(groups[0]), rank)
        before = plain_group(groups[0])
        release_communicators(meanwhile=lambda: calls.append(0))
        assert plain_group(groups[0]) is not before
        assert mpu.get_tensor_model_parallel_group() is groups[0]
    assert len(calls) == 4
    late = dist.new_group([0, 1])
    call_everything(late, rank)
    return count


def test_groups_are_exchanged_behind_those_who_hold_them():
    first, second = run_ranks(release_twice, 2)
    assert first == second > 5
