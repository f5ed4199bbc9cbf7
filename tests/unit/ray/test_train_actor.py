"""The environment of a trainer: its threads."""

import os
from argparse import Namespace

import pytest

from slime.ray import train_actor


@pytest.mark.parametrize(("has_gpus", "threads"), [(True, "16"), (False, "8")], ids=["4 GPUs a host", "one CPU host"])
def test_the_ranks_of_a_host_share_its_cores(has_gpus: bool, threads: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_actor, "cluster_has_accelerators", lambda: has_gpus)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    args = Namespace(
        rollout_external=True, actor_num_gpus_per_node=4, debug_train_only=True, offload_train=False, train_env_vars={}
    )
    assert train_actor.trainer_environment(args, 8)["OMP_NUM_THREADS"] == threads
    args.train_env_vars = {"OMP_NUM_THREADS": 3}
    assert train_actor.trainer_environment(args, 8)["OMP_NUM_THREADS"] == "3"
