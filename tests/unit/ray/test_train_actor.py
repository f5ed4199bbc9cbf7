"""Which library of the memory saver a trainer is started with."""

import importlib.machinery
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
