"""A trainer's environment: its number of threads."""

import os
from argparse import Namespace

import pytest

from slime.ray import train_actor

GPU_NODE = {"CPU": 64.0, "GPU": 4.0, "accelerator_type:H100": 1.0}
HEAD = {"CPU": 8.0}


@pytest.mark.parametrize(
    ("nodes", "threads"),
    [
        ([GPU_NODE, GPU_NODE], "16"),
        ([HEAD, GPU_NODE, GPU_NODE | {"CPU": 32.0}], "8"),
        ([{"CPU": 20.0, "GPU": 8.0}], "6"),  # logical GPUs: eight ranks on this host
    ],
    ids=["4 GPUs a host", "a driver on a node without GPUs", "one CPU host"],
)
def test_the_ranks_of_a_host_share_its_cores(
    nodes: list[dict[str, float]], threads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_actor, "cluster_has_accelerators", lambda: GPU_NODE in nodes)
    monkeypatch.setattr(train_actor.ray, "nodes", lambda: [{"Alive": True, "Resources": node} for node in nodes])
    monkeypatch.setattr(os, "cpu_count", lambda: 48)  # of the driver's host
    args = Namespace(
        rollout_external=True, actor_num_gpus_per_node=4, debug_train_only=True, offload_train=False, train_env_vars={}
    )
    assert train_actor.trainer_environment(args, 8)["OMP_NUM_THREADS"] == threads
    args.train_env_vars = {"OMP_NUM_THREADS": 3}
    assert train_actor.trainer_environment(args, 8)["OMP_NUM_THREADS"] == "3"
