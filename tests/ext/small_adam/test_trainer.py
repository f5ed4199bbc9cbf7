"""Small Adams in a trainer: what their flags need, how they step, and what a checkpoint and a sleep keep."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from slime.utils.errors import ConfigError
from tests.dist.test_checkpoint_resume import load_and_train, train_and_save
from tests.dist.test_schedules import LARGE_EPS, Follow, distance, follow, same
from tests.dist.trainer_case import write_model
from tests.matrix.pool import run_ranks
from tests.unit.backends.megatron_utils.megatron_case import parse
from tests.unit.backends.megatron_utils.test_sleep import build_with, check_sleep, new_memory_holds_anything

__all__ = ["follow", "new_memory_holds_anything"]

DENSE = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --vocab-size 100 --swiglu".split()
NARROW = "--bf16 --use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype fp16"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("", "need --use-precision-aware-optimizer"),
        ("--use-precision-aware-optimizer --use-stateless-adam", "--use-stateless-adam has no moments"),
    ],
)
def test_narrow_moments_without_what_they_need_are_refused(flags: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"--exp-avg-dtype torch.bfloat16.*{message}"):
        parse(*DENSE, "--exp-avg-dtype", "bf16", *flags.split())


def test_sleeping_between_rollouts_changes_no_bit_of_narrow_moments(tmp_path: Path) -> None:
    write_model(tmp_path, "qwen3")
    check_sleep(partial(build_with, tmp_path, NARROW), has_copies=True)


@pytest.mark.dist
def test_bf16_moments_of_adam_resume_bit_for_bit_on_two_ranks(tmp_path: Path) -> None:
    layout = ["--use-precision-aware-optimizer", "--exp-avg-dtype", "bf16", "--exp-avg-sq-dtype", "bf16"]
    expected = run_ranks(train_and_save, 2, layout, "--bf16", str(tmp_path))
    assert run_ranks(load_and_train, 2, layout, "--bf16", str(tmp_path)) == expected


@pytest.mark.dist
def test_with_reset_moments_a_rollout_starts_like_a_fresh_optimizer(follow: Follow) -> None:  # noqa: F811
    """From zero moments Adam's step is the gradient over its size: what the stateless form computes."""
    (reset,) = follow(1, "--reset-optimizer-states", *LARGE_EPS)
    (stateless,) = follow(1, "--use-stateless-adam", *LARGE_EPS)
    (plain,) = follow(1, *LARGE_EPS)
    start = plain["weights"][0]
    assert same(reset["weights"][1], plain["weights"][1])
    assert distance(reset["weights"][2], plain["weights"][2], start) > 1e-2
    for rollout in (1, 2):
        assert distance(stateless["weights"][rollout], reset["weights"][rollout], start) < 1e-4


@pytest.mark.dist
def test_stateless_adam_keeps_no_byte(follow: Follow) -> None:  # noqa: F811
    (stateless,) = follow(1, "--use-stateless-adam", *LARGE_EPS)
    (plain,) = follow(1, *LARGE_EPS)
    parameters = sum(tensor.numel() for tensor in plain["weights"][0].values())
    assert stateless["state_bytes"] == 0
    assert plain["state_bytes"] >= 2 * 4 * parameters


@pytest.mark.dist
def test_a_sharded_stateless_adam_does_the_same_as_a_whole_one(follow: Follow) -> None:  # noqa: F811
    (one,) = follow(1, "--use-stateless-adam", *LARGE_EPS)
    two = follow(2, "--use-stateless-adam", *LARGE_EPS)
    assert same(two[0]["weights"][-1], two[1]["weights"][-1])
    assert distance(two[0]["weights"][-1], one["weights"][-1], one["weights"][0]) < 1e-4
