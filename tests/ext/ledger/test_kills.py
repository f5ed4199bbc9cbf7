"""Killed at about two hundred points, the job trains the same data, and requests no answer twice."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from slime.ext.ledger.frames import read_folder
from slime.ext.ledger.records import ReplayState
from tests.ext.ledger import control_plane
from tests.ext.ledger.control_plane import World, make_world, run_to_the_end
from tests.unit.rollout import fake_cluster
from tools.ledger import Balance

NUM_GROUPS = 14
HERE = control_plane.__name__
FULLY_ASYNC = {
    "rollout_function_path": "slime.rollout.fully_async_rollout.generate_rollout_fully_async",
    "sglang_server_concurrency": 16,
}


def uninterrupted(folder: Path, monkeypatch: Any, **options: Any) -> World:
    world = make_world(folder / "whole", num_groups=NUM_GROUPS, **options)
    run_to_the_end(world, monkeypatch)
    assert world.asked_again == []
    return world


def killed(folder: Path, monkeypatch: Any, whole: World, seed: int, **options: Any) -> World:
    """The same job, killed one to four times at seeded steps."""
    rng = random.Random(seed)
    kills = [rng.randint(1, whole.num_steps) for _ in range(rng.randint(1, 4))]
    world = make_world(folder / f"killed{seed}", num_groups=NUM_GROUPS, kills=kills, seed=seed, **options)
    run_to_the_end(world, monkeypatch)
    return world


def trained_groups(world: World) -> Counter[int]:
    """Group -> how often one of its samples is trained in the surviving lineage."""
    return Counter(sample["group"] for samples in world.trained.values() for sample in samples)


@pytest.mark.parametrize(
    ("num_jobs", "options"),
    [
        (15, {}),
        (5, {"save_interval": 3}),
        (3, {"save_interval": 100}),
        (3, {"flags": {"group_rm": True}, "save_interval": 2}),
        (3, {"flags": {"custom_generate_function_path": f"{HERE}.attaches_a_lock"}}),
        (3, {"flags": {"custom_generate_function_path": f"{fake_cluster.__name__}.fan_out"}, "save_interval": 2}),
        (3, {"flags": {"rollout_sample_hook_path": [f"{HERE}.counts_visits"]}, "save_interval": 2}),
        (8, {"is_ahead": True}),
        (3, {"is_ahead": True, "save_interval": 3}),
        (5, {"flags": FULLY_ASYNC}),
        (8, {"flags": FULLY_ASYNC, "is_ahead": True}),
        (5, {"flags": FULLY_ASYNC, "is_ahead": True, "save_interval": 3}),
    ],
    ids=[
        *("saves always", "saves seldom", "saves once", "group reward", "unpicklable", "fan-out", "sample hook"),
        *("saves while the next one runs", "and seldom"),
        *("fully async in turn", "fully async", "fully async, saves seldom"),
    ],
)
def test_a_killed_job_trains_the_samples_of_the_uninterrupted_one(tmp_path, monkeypatch, num_jobs, options):
    whole = uninterrupted(tmp_path, monkeypatch, **options)
    expected = whole.samples_of_first_groups()
    num_kills = 0
    for seed in range(num_jobs):
        world = killed(tmp_path, monkeypatch, whole, seed, **options)
        num_kills += world.num_lives - 1
        assert world.samples_of_first_groups() == expected, f"seed {seed}, killed after steps {world.kills}"
        assert world.asked_again == [], f"seed {seed}, killed after steps {world.kills}"
        balance = Balance(ReplayState().read(read_folder(world.folder / "save" / "ledger")))
        assert balance.problems() == [], f"seed {seed}, killed after steps {world.kills}"
    assert num_kills >= num_jobs


def test_tokens_that_an_older_policy_drew_stay_masked_and_only_those(tmp_path, monkeypatch):
    """How much of a response is cut off depends on the time of the abort; whether it is masked does not."""
    options: dict[str, Any] = {"flags": {"mask_offpolicy_in_partial_rollout": True}}
    whole = uninterrupted(tmp_path, monkeypatch, **options)
    expected = whole.samples_of_first_groups(but="masked")
    first_rollout = {sample["index"]: sample["masked"] for sample in whole.trained[0]}
    assert set(first_rollout.values()) == {0}
    assert any(sample["masked"] for sample in whole.trained[1] + whole.trained[2])
    for seed in range(8):
        world = killed(tmp_path, monkeypatch, whole, seed, **options)
        assert world.samples_of_first_groups(but="masked") == expected
        assert {sample["masked"] for sample in world.trained[0]} == {0}


def test_without_surplus_every_rollout_trains_the_very_same_samples(tmp_path, monkeypatch):
    options: dict[str, Any] = {
        "flags": {"over_sampling_batch_size": 4, "partial_rollout": False, "dynamic_sampling_filter_path": None},
        "dull": None,
    }
    whole = uninterrupted(tmp_path, monkeypatch, **options)
    for seed in range(8):
        world = killed(tmp_path, monkeypatch, whole, seed, **options)
        assert world.trained == whole.trained
        assert world.asked_again == []


def test_no_group_is_trained_twice_and_each_is_trained_dropped_or_waiting(tmp_path, monkeypatch):
    whole = uninterrupted(tmp_path, monkeypatch)
    for seed in range(10):
        world = killed(tmp_path, monkeypatch, whole, seed)
        counts = trained_groups(world)
        assert set(counts.values()) == {2}
        waiting = {group[0]["group_index"] for group in world.final_state["buffer"]}
        assert not waiting & counts.keys()
        gone = set(range(world.final_state["sample_group_index"])) - counts.keys() - waiting
        assert all(name % 5 == world.dull for name in gone), f"seed {seed} lost {gone}"
        state = ReplayState().read(read_folder(world.folder / "save" / "ledger"))
        handed = Counter(handed.name for rollout in state.rollouts.values() for handed in rollout.handed)
        filtered = {name for rollout in state.rollouts.values() for name in rollout.filtered}
        assert set(handed.values()) <= {1} and handed.keys() <= counts.keys() and filtered <= gone


def test_without_the_ledger_the_answers_after_the_checkpoint_are_asked_for_again(tmp_path, monkeypatch):
    """Tests the check itself, which must be able to fail."""
    world = make_world(tmp_path / "a", num_groups=NUM_GROUPS, kills=[150], save_interval=100)
    life = control_plane.Life(world, monkeypatch)
    assert not life.run()
    for path in (world.folder / "save" / "ledger").iterdir():
        path.unlink()
    run_to_the_end(world, monkeypatch)
    assert len(world.asked_again) > 5
