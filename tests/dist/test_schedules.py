"""When old policies, the reference, Adam's moments and frozen parameters change: on two data-parallel ranks, with a
sharded optimizer, as in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.dist import schedule_case
from tests.dist.trainer_case import write_model
from tests.matrix.pool import RankPool

pytestmark = pytest.mark.dist

Follow = Callable[..., list[dict[str, Any]]]
NOTE = ("--rollout-data-postprocess-path", "tests.dist.schedule_case.note_log_probs")
KL = ("--use-kl-loss", "--kl-loss-coef", 0.05)
LARGE_EPS = ("--adam-eps", 1.0, "--lr", 0.1)
"""Adam's first step is the sign of the gradient, which depends on summation order where the gradient is nearly zero.
The rate makes steps large against the rounding of fp32 weights."""


@pytest.fixture(scope="module")
def follow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Follow]:
    """Runs a trainer on this many ranks; equal runs happen once."""
    folder = tmp_path_factory.mktemp("hf")
    write_model(folder)
    done: dict[Any, list[dict[str, Any]]] = {}
    with RankPool() as pool:

        def run(world_size: int, *flags: object, rollouts: int = 2) -> list[dict[str, Any]]:
            key = (world_size, flags, rollouts)
            if key not in done:
                done[key] = pool.run(schedule_case.follow, world_size, str(Path(folder)), flags, rollouts)
            return done[key]

        yield run


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    assert left.keys() == right.keys()
    return all(torch.equal(tensor, right[name]) for name, tensor in left.items())


def distance(left: dict[str, Tensor], right: dict[str, Tensor], start: dict[str, Tensor]) -> float:
    """Largest difference, relative to the distance that training moved from the start."""
    moved = max(float((tensor - start[name]).abs().max()) for name, tensor in right.items())
    assert moved > 0
    return max(float((tensor - left[name]).abs().max()) for name, tensor in right.items()) / moved


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    ("interval", "expected"),
    [
        (1, [0, 0, 1]),  # trained with: weights 0, 1, 2
        (2, [0, 0, 0, 2]),  # rollout 2 was generated before the push after rollout 1
    ],
)
def test_a_kept_actor_is_the_policy_that_drew_the_rollout(
    follow: Follow, world_size: int, interval: int, expected: list[int]
) -> None:
    """In a loop that is one rollout ahead, rollout k is generated before rollout k - 1's weights are pushed."""
    flags = ("--keep-old-actor", "--update-weights-interval", interval, *NOTE)
    for rank in follow(world_size, *flags, rollouts=len(expected)):
        assert not same(rank["weights"][0], rank["weights"][1])
        for rollout, version in enumerate(expected):
            noted, computed = rank["noted"][rollout], rank["computed"]
            matches = [all(map(torch.equal, noted, log_probs)) for log_probs in computed]
            assert matches == [index == version for index in range(len(computed))]


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_reference_becomes_the_actor_after_the_interval_and_not_before(follow: Follow, world_size: int) -> None:
    for rank in follow(world_size, *KL, "--ref-update-interval", 2, rollouts=4):
        weights = rank["weights"]
        assert [[same(ref, weight) for weight in weights].index(True) for ref in rank["ref"]] == [0, 2, 2, 4]
        kl = [step["train/kl_loss"] for step in rank["metrics"] if step]
        if kl:
            assert kl[0] == kl[2] == 0.0 and kl[1] and kl[3]


FROZEN = {
    ("--only-train-params-name-list", "linear_fc1", "final_layernorm"): lambda name: (
        "linear_fc1" not in name and "final_layernorm" not in name
    ),
    ("--freeze-params-name-list", r"layers\.0\.", "embedding"): lambda name: (
        ".layers.0." in name or "embedding" in name
    ),
}


@pytest.mark.parametrize("flags", FROZEN, ids=["only-train", "freeze"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_frozen_parameters_keep_every_bit_and_all_others_move(
    follow: Follow, world_size: int, flags: tuple[str, ...]
) -> None:
    for rank in follow(world_size, *flags, *LARGE_EPS):
        first, last = rank["weights"][0], rank["weights"][-1]
        frozen = {name for name in first if torch.equal(first[name], last[name])}
        assert frozen == {name for name in first if FROZEN[flags](name)}
        assert 0 < len(frozen) < len(first)


def test_a_tied_embedding_that_is_frozen_does_not_hold_up_pipeline_stages(tmp_path: Path) -> None:
    write_model(tmp_path, num_hidden_layers=4, tie_word_embeddings=True)
    flags = ("--pipeline-model-parallel-size", 2, "--freeze-params-name-list", "embedding", *LARGE_EPS)
    with RankPool() as pool:
        ranks = pool.run(schedule_case.follow, 2, str(tmp_path), flags, 1, timeout_s=300)
    for rank in ranks:
        first, last = rank["weights"][0], rank["weights"][-1]
        is_tied = [name for name in first if "word_embeddings" in name or "output_layer" in name]
        assert {name for name in first if torch.equal(first[name], last[name])} == {*is_tied}


@pytest.mark.parametrize(
    "flags",
    [("--reset-optimizer-states",), *FROZEN],
    ids=["reset", "only-train", "freeze"],
)
def test_a_sharded_optimizer_does_the_same_as_a_whole_one(follow: Follow, flags: tuple[str, ...]) -> None:
    (one,) = follow(1, *flags, *LARGE_EPS)
    two = follow(2, *flags, *LARGE_EPS)
    assert same(two[0]["weights"][-1], two[1]["weights"][-1])
    assert distance(two[0]["weights"][-1], one["weights"][-1], one["weights"][0]) < 1e-4
