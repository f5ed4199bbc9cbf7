"""How many GPUs a job takes, and in which order they are handed out."""

from argparse import Namespace

import pytest

from slime.ray.gpus import GpuSlice, _sort_key, plan_gpus


def arguments(**changes):
    base = dict(
        actor_num_nodes=1,
        actor_num_gpus_per_node=4,
        rollout_num_gpus=2,
        debug_train_only=False,
        debug_rollout_only=False,
        colocate=False,
        rollout_external=False,
    )
    return Namespace(**(base | changes))


@pytest.mark.parametrize(
    ("changes", "num_gpus", "offset"),
    [
        ({}, 6, 4),  # disaggregated: trainers first, engines behind them
        ({"colocate": True}, 4, 0),
        ({"colocate": True, "rollout_num_gpus": 8}, 8, 0),  # engines beyond the trainers' GPUs
        ({"debug_train_only": True}, 4, 0),
        ({"debug_rollout_only": True}, 2, 0),
        ({"rollout_external": True}, 4, 4),  # the engines' GPUs are somebody else's
        ({"rollout_external": True, "debug_rollout_only": True}, 0, 0),
        ({"actor_num_nodes": 2, "rollout_num_gpus": 0}, 8, 8),  # router only
    ],
)
def test_the_mode_decides_size_and_offset(changes, num_gpus, offset):
    assert plan_gpus(arguments(**changes)) == (num_gpus, offset)


def test_gpus_are_ordered_by_the_numbers_of_the_address_not_by_its_letters():
    nodes = [("10.0.0.10", 0), ("10.0.0.9", 1), ("10.0.0.9", 0)]
    assert sorted(nodes, key=lambda node: _sort_key(*node)) == [("10.0.0.9", 0), ("10.0.0.9", 1), ("10.0.0.10", 0)]


def test_a_slice_from_an_offset_keeps_bundle_and_gpu_together():
    everything = GpuSlice(None, [2, 0, 1], [7, 5, 6])
    assert everything.from_offset(1) == GpuSlice(None, [0, 1], [5, 6])
