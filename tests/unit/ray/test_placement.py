"""How many GPUs a job takes, and in which order they are assigned."""

from argparse import Namespace

import pytest
import ray

from slime.flags.cluster import plan_gpus
from slime.ray import gpus, waiting
from slime.ray.gpus import GpuSlice, _sort_key
from slime.ray.waiting import Interrupted, sigterm
from slime.utils.errors import ConfigError


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
        ({}, 6, 4),  # disaggregated: trainers first, then engines
        ({"colocate": True}, 4, 0),
        ({"colocate": True, "rollout_num_gpus": 8}, 8, 0),  # engines beyond the trainers' GPUs
        ({"debug_train_only": True}, 4, 0),
        ({"debug_rollout_only": True}, 2, 0),
        ({"rollout_external": True}, 4, 4),  # engines on GPUs outside the job
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


@pytest.fixture
def cluster(monkeypatch):
    """Ray with one GPU, which another job uses."""
    group = Namespace(ready=ray.ObjectRef.from_random)
    monkeypatch.setattr(gpus, "placement_group", lambda *_, **__: group)
    monkeypatch.setattr(gpus.ray, "cluster_resources", lambda: {"GPU": 1.0, "CPU": 2.0})
    monkeypatch.setattr(gpus.ray, "available_resources", lambda: {"CPU": 1.0})
    monkeypatch.setattr(gpus.ray, "nodes", lambda: [])
    monkeypatch.setattr(gpus.ray.util, "remove_placement_group", lambda group: None)
    monkeypatch.setattr(waiting.ray, "wait", lambda refs, **_: ([], refs))


def test_gpus_that_another_job_holds_are_an_error_with_what_is_free(cluster):
    with pytest.raises(ConfigError, match="has 1 GPUs, but only 0 GPUs and 1 CPUs are free after 0 s: another job"):
        gpus._reserve(1, timeout_s=0.2)


@pytest.mark.parametrize("num_gpus", [1, 2])
def test_sigterm_ends_the_wait_for_nodes_and_for_gpus_that_are_free(cluster, monkeypatch, num_gpus):
    monkeypatch.setattr(sigterm(), "has_come", True)
    with pytest.raises(Interrupted):
        gpus._reserve(num_gpus, timeout_s=1.5)
