"""Advantage estimators against the reference on random ragged batches."""

import random

import pytest
import torch

from slime.algorithms.advantages import AdvantageConfig, AdvantageInputs, get_estimator
from slime.algorithms.advantages.whitening import whiten
from slime.train_data.rewards import post_process_rewards
from tests.oracle import reference
from tests.oracle.batches import random_examples

SEEDS = range(8)


def inputs_of(examples):
    penalties = [
        reference.kl(reference.f64(example.old), reference.f64(example.reference), "k3") for example in examples
    ]
    inputs = AdvantageInputs(
        rewards_N=[example.reward for example in examples],
        kl_N=[penalty.float() for penalty in penalties],
        mask_N=[torch.tensor(example.mask) for example in examples],
        values_N=[torch.tensor(example.values) for example in examples],
    )
    return inputs, penalties


def assert_rows_close(actual, expected):
    for row, wanted in zip(actual, expected, strict=True):
        torch.testing.assert_close(row.double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("std", [True, False])
def test_group_normalisation(seed, std):
    rng = random.Random(seed)
    rewards = [rng.choice([0.0, 1.0, rng.random()]) for _ in range(24)]
    actual = post_process_rewards(
        rewards,
        n_samples_per_prompt=4,
        rollout_batch_size=6,
        advantage_estimator="grpo",
        rewards_normalization=True,
        grpo_std_normalization=std,
    )
    assert actual == pytest.approx(reference.group_normalised(rewards, 4, std), abs=1e-9)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ["grpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo"])
def test_estimators(seed, name):
    examples = random_examples(seed)
    inputs, penalties = inputs_of(examples)
    config = AdvantageConfig(kl_coef=0.3, gamma=0.95, lambd=0.9)
    advantages, returns = get_estimator(name).compute(inputs, config)
    pairs = list(zip(examples, penalties, strict=True))
    if name == "grpo":
        expected = [reference.reward_on_every_token(example) for example in examples]
    elif name == "reinforce_plus_plus":
        expected = [reference.reinforce_plus_plus(example, penalty, 0.3, 0.95) for example, penalty in pairs]
    elif name == "reinforce_plus_plus_baseline":
        expected = [reference.reinforce_plus_plus_baseline(example, penalty, 0.3) for example, penalty in pairs]
    else:
        both = [reference.gae(example, penalty, 0.3, 0.95, 0.9) for example, penalty in pairs]
        expected = [advantage for advantage, _ in both]
        assert_rows_close(returns, [target for _, target in both])
    assert_rows_close(advantages, expected)


@pytest.mark.parametrize("seed", SEEDS)
def test_whitening(seed):
    examples = random_examples(seed)
    rows = [
        torch.randn(example.response_length, generator=torch.Generator().manual_seed(index))
        for index, example in enumerate(examples)
    ]
    actual = whiten(rows, [torch.tensor(example.mask) for example in examples])
    assert_rows_close(actual, reference.whitened([row.double() for row in rows], examples))
