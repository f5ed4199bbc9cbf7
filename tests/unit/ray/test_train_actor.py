"""The environment of a trainer: its threads, and the library of the memory saver that it is started with."""

import importlib.machinery
import os
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from slime.ray import train_actor
from slime.utils.errors import ConfigError


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    origin = tmp_path / "torch_memory_saver" / "__init__.py"
    spec = importlib.machinery.ModuleSpec("torch_memory_saver", None, origin=str(origin))
    monkeypatch.setattr(train_actor, "find_spec", lambda name: spec)
    return tmp_path


def put(site: Path, *suffixes: str) -> None:
    for suffix in suffixes:
        (site / train_actor.PRELOAD_LIBRARY.format(suffix)).touch()


def test_the_library_fits_the_cuda_that_torch_was_built_for(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(site, "_cu12", "_cu13", "")
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert train_actor._preload_library().name.endswith("preload_cu12.abi3.so")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert train_actor._preload_library().name.endswith("preload_cu13.abi3.so")


def test_an_older_release_has_one_library_for_all(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(site, "")
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert train_actor._preload_library().name == "torch_memory_saver_hook_mode_preload.abi3.so"


def test_a_library_for_another_cuda_is_refused(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(site, "_cu13")
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    with pytest.raises(ConfigError, match="12.8"):
        train_actor._preload_library()


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
