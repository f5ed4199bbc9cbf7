"""What starts concurrently: trainer processes import while engines start, and allocate memory after them."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from slime.compose import SINKS, TRANSFORMS
from slime.ray import actor_group, startup
from slime.ray.actor_group import RayTrainGroup
from slime.ray.parts import Part, Parts


def test_the_processes_of_the_ranks_are_started_once(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []

    def start_ranks(worker_class: Any, gpus: Any, names: list[str], environment: Any, **_: Any) -> list[Any]:
        started.append(names)
        return list(names)

    monkeypatch.setattr(actor_group, "start_ranks", start_ranks)
    monkeypatch.setattr(actor_group, "trainer_environment", lambda args, world_size: {})
    args = Namespace(save=None, rollout_data_transport="object-store")
    group = RayTrainGroup(args, 1, 2, pg=None)  # type: ignore[arg-type]
    group.begin()
    group.begin()  # as create() does
    assert started == [["actor rank 0", "actor rank 1"]] and group.actors == started[0]


def test_a_part_of_a_broken_module_raises_the_error_of_the_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "some_package").mkdir()
    (tmp_path / "some_package/broken.py").write_text("import not_installed\n\nclass Sink: ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="not_installed"):
        Part("some_package.broken:Sink").load()
    named = [*SINKS.values(), *TRANSFORMS.values(), actor_group.RayTrainGroup.worker]
    assert all(name.count(":") == 1 for name in named)


def test_what_may_happen_meanwhile_comes_before_the_wait_for_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []

    class Manager:
        def __getattr__(self, name: str) -> Any:
            return Namespace(remote=lambda: name)

    monkeypatch.setattr(startup, "record_runtime", lambda args, **facts: None)
    monkeypatch.setattr(startup, "values_of_the_run", dict)
    monkeypatch.setattr(startup, "start_rollout_manager", lambda *_: notes.append("manager") or Manager())
    monkeypatch.setattr(startup, "watch", lambda actor, name: None)
    monkeypatch.setattr(startup, "watch_start", lambda ref, what: notes.append(f"watched: {ref}"))
    monkeypatch.setattr(startup, "wait_for", lambda ref, **_: notes.append(ref))
    monkeypatch.setattr(startup, "cluster_has_accelerators", lambda: True)
    timeouts = dict(train_timeout_s=1, engine_start_timeout_s=1, weight_update_timeout_s=1)
    args = Namespace(num_rollout=1, offload_rollout=True, debug_train_only=False, **timeouts)
    startup.create_rollout_manager(args, None, meanwhile=lambda: notes.append("ranks"))  # type: ignore[arg-type]
    beside = ["manager", "watched: wait_ready", "ranks"]
    assert notes == [*beside, "get_num_rollout_per_epoch", "wait_ready", "offload"]


def test_a_trainer_without_ranks_starts_no_process() -> None:
    group = startup.make_actor(Namespace(debug_rollout_only=True, save=None), None, Parts())  # type: ignore[arg-type]
    group.begin()
    assert group.actors == []
