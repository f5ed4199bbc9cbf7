"""Estimators, the scan they use, and whitening."""

import math

import pytest
import torch

from slime.algorithms.advantages import ESTIMATORS, AdvantageConfig, AdvantageInputs, get_estimator
from slime.algorithms.advantages.whitening import whiten
from slime.algorithms.discounted import discounted_suffix_sums
from slime.algorithms.gae import generalised_advantages
from slime.utils.errors import ConfigError, DataError


def compute(name, config=None, **inputs):
    return get_estimator(name).compute(AdvantageInputs(**inputs), config or AdvantageConfig())


def floats(tensors):
    return [pytest.approx(tensor.tolist(), abs=1e-6) for tensor in tensors]


@pytest.mark.parametrize("length", [0, 1, 2, 3, 127, 128, 129, 1000])
@pytest.mark.parametrize("factor", [0.0, 0.9, 0.999, 1.0])
def test_scan_equals_the_sequential_sum(length, factor):
    values = torch.randn(2, length, dtype=torch.float64, generator=torch.Generator().manual_seed(length))
    expected = torch.zeros_like(values)
    total = torch.zeros(2, dtype=torch.float64)
    for step in reversed(range(length)):
        total = values[:, step] + factor * total
        expected[:, step] = total
    torch.testing.assert_close(discounted_suffix_sums(values, factor), expected)


def test_gae_matches_golden_values():
    advantages, returns = generalised_advantages(
        [torch.tensor([0.0, 0.0, 1.0])], [torch.tensor([0.1, 0.2, 0.3])], gamma=1.0, lambd=1.0
    )
    assert floats(advantages) == [[0.9, 0.8, 0.7]]
    assert floats(returns) == [[1.0, 1.0, 1.0]]


@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo"])
def test_group_relative_puts_the_reward_on_every_token(name):
    kl = [torch.tensor([5.0, 5.0]), torch.zeros(0), torch.zeros(1)]
    advantages, returns = compute(name, AdvantageConfig(kl_coef=9.0), rewards_N=[1.5, 2.0, -1.0], kl_N=kl)
    assert floats(advantages) == [[1.5, 1.5], [], [-1.0]]
    assert floats(returns) == [[1.5, 1.5], [], [-1.0]]


def test_reinforce_plus_plus_discounts_from_the_last_trained_token():
    advantages, _ = compute(
        "reinforce_plus_plus",
        AdvantageConfig(kl_coef=0.1, gamma=0.5),
        rewards_N=[8.0, 3.0],
        kl_N=[torch.tensor([1.0, 2.0, 7.0, 4.0]), torch.tensor([1.0, 1.0])],
        mask_N=[torch.tensor([1, 0, 1, 0]), torch.tensor([0, 0])],
    )
    # rewards of the steps: -0.1, -0.7 + 8; a sample without a trained token has no return at all
    assert floats(advantages) == [[-0.1 + 0.5 * 7.3, 0.0, 7.3, 0.0], [0.0, 0.0]]


def test_baseline_takes_the_penalty_off_every_token():
    advantages, _ = compute(
        "reinforce_plus_plus_baseline",
        AdvantageConfig(kl_coef=0.1),
        rewards_N=torch.tensor([2.0]),
        kl_N=[torch.tensor([1.0, -1.0])],
    )
    assert floats(advantages) == [[1.9, 2.1]]


def test_ppo_rewards_the_last_token_of_the_response():
    advantages, returns = compute(
        "ppo",
        AdvantageConfig(kl_coef=0.1),
        rewards_N=[1.0, 1.0],
        kl_N=[torch.tensor([1.0, 2.0]), torch.zeros(0)],
        values_N=[torch.tensor([0.5, 0.25]), torch.zeros(0)],
    )
    assert floats(returns) == [[0.7, 0.8], []]
    assert floats(advantages) == [[0.2, 0.55], []]


@pytest.mark.parametrize(
    ("mask", "values", "lambd", "advantages", "returns"),
    [
        # deltas: 0.2 - 0.1, 0.3 - 0.2, 0.4 - 0.3, 1 - 0.4
        ([1, 1, 0, 0, 1, 1], [0.1, 0.2, 5.0, -3.0, 0.3, 0.4], 1.0, [0.9, 0.8, 0, 0, 0.7, 0.6], [1, 1, 0, 0, 1, 1]),
        ([1, 1, 0, 0], [0.0, 0.0, 0.0, 0.0], 0.5, [0.5, 1, 0, 0], [0.5, 1, 0, 0]),
    ],
    ids=["values of the tool's tokens", "a masked end"],
)
def test_what_a_tool_wrote_is_no_step_of_ppo(mask, values, lambd, advantages, returns):
    kl = [torch.where(torch.tensor(mask) != 0, 0.0, 7.0)]
    found = compute(
        "ppo",
        AdvantageConfig(kl_coef=0.1, lambd=lambd),
        rewards_N=[1.0],
        kl_N=kl,
        mask_N=[torch.tensor(mask)],
        values_N=[torch.tensor(values)],
    )
    assert [floats(rows) for rows in found] == [[advantages], [returns]]


@pytest.mark.parametrize("name", ESTIMATORS)
def test_masked_tokens_leave_the_advantages_of_the_others_alone(name):
    config = AdvantageConfig(kl_coef=0.3, gamma=0.9, lambd=0.8)
    mask, kl, values = torch.tensor([0, 1, 1, 0, 0, 1, 0]), torch.rand(7), torch.rand(7)
    trained = mask != 0
    found = compute(name, config, rewards_N=[2.0], kl_N=[kl], mask_N=[mask], values_N=[values])
    alone = compute(name, config, rewards_N=[2.0], kl_N=[kl[trained]], values_N=[values[trained]])
    for rows, expected in zip(found, alone, strict=True):
        torch.testing.assert_close(rows[0][trained], expected[0])


def test_unknown_estimator_and_impossible_discount_are_refused():
    with pytest.raises(ConfigError, match="--advantage-estimator is 'rloo'; it must be one of grpo"):
        get_estimator("rloo")
    with pytest.raises(ConfigError, match="--gamma is 1.5"):
        AdvantageConfig(gamma=1.5)


def test_whitening_counts_trained_tokens_only_and_moves_all():
    values = [torch.tensor([1.0, 4.0]), torch.tensor([3.0])]
    masks = [torch.tensor([1, 0]), torch.tensor([1])]
    # mean 2, unbiased variance 2
    whitened = whiten(values, masks)
    assert floats(whitened) == [[-1 / math.sqrt(2), 2 / math.sqrt(2)], [1 / math.sqrt(2)]]


def test_whitening_survives_a_variance_small_against_the_mean():
    values = [torch.tensor([1000.0, 1000.5, 1001.0])]
    torch.testing.assert_close(whiten(values, [torch.ones(3)])[0], torch.tensor([-1.0, 0.0, 1.0]))


def test_one_trained_token_is_whitened_to_zero_and_none_is_refused():
    assert whiten([torch.tensor([5.0])], [torch.ones(1)])[0].tolist() == [0.0]
    with pytest.raises(DataError, match="--normalize-advantages"):
        whiten([torch.tensor([5.0])], [torch.zeros(1)])


def test_old_path_has_the_old_signatures():
    from slime.utils import ppo_utils

    loss, clipped = ppo_utils.compute_policy_loss(-torch.tensor([1.5]).log(), torch.ones(1), 0.2, 0.28)
    assert loss.item() == pytest.approx(-1.28)
    rewards, values = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[0.1, 0.2, 0.3]])
    for gae in (ppo_utils.vanilla_gae, ppo_utils.chunked_gae):
        advantages, returns = gae(rewards, values, 1.0, 1.0)
        assert floats(advantages) == [[0.9, 0.8, 0.7]]
    assert [x.tolist() for x in ppo_utils.get_grpo_returns(torch.tensor([2.0]), [torch.zeros(2)])] == [[2.0, 2.0]]
    for num_tokens in (3, 1, 0):
        logits, tokens = torch.zeros(num_tokens, 2), torch.zeros(num_tokens, dtype=torch.long)
        log_prob, entropy = ppo_utils.calculate_log_probs_and_entropy(logits, tokens, None)
        assert log_prob.shape == (num_tokens, 1)  # callers squeeze the last dimension
        assert entropy is None
        assert floats(log_prob.squeeze(-1)) == [pytest.approx(-0.6931, abs=1e-4)] * num_tokens
        log_prob, entropy = ppo_utils.calculate_log_probs_and_entropy(logits, tokens, None, with_entropy=True)
        assert (log_prob.shape, entropy.shape) == ((num_tokens, 1), (num_tokens,))
