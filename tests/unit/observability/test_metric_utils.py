"""Small metric functions, with values by hand."""

from argparse import Namespace

import pytest

from slime.observability.metric_utils import (
    compression_ratio,
    compute_pass_rate,
    compute_rollout_step,
    has_repetition,
    pass_at_k,
)


@pytest.mark.parametrize(
    ("n", "c", "k", "chance"),
    [
        (4, 1, 1, 0.25),
        (4, 1, 2, 0.5),  # 3 of the 6 pairs contain the correct one
        (4, 2, 2, 1 - 1 / 6),
        (4, 0, 4, 0.0),
        (4, 3, 2, 1.0),
    ],
)
def test_pass_at_k_counts_draws_without_replacement(n: int, c: int, k: int, chance: float) -> None:
    assert pass_at_k(n, c, k) == pytest.approx(chance)


def test_rewards_that_are_not_whole_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="2 groups of 4"):
        compute_pass_rate([1, 0, 0], group_size=4, num_groups=2)


def test_the_rollout_step_counts_optimizer_steps_when_asked() -> None:
    args = Namespace(rollout_batch_size=32, n_samples_per_prompt=8, global_batch_size=64)
    assert compute_rollout_step(args, 5) == 5
    args.wandb_always_use_train_step = True
    assert compute_rollout_step(args, 5) == 20


def test_only_long_texts_that_loop_are_repetitive() -> None:
    assert has_repetition("ab" * 6000)
    assert not has_repetition("ab" * 4000)
    assert compression_ratio("ab" * 4000)[0] > 100
