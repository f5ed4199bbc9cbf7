"""KL estimators, mismatch corrections, value loss, reduction: golden values and refusals."""

import math

import pytest
import torch

from slime.algorithms.kl import approx_kl
from slime.algorithms.off_policy import MismatchBounds, icepop, truncated_importance_sampling
from slime.algorithms.reduction import num_loss_tokens, scale_for_megatron, sum_of_sample_means
from slime.algorithms.value_loss import clipped_value_loss


@pytest.mark.parametrize(
    ("kind", "difference", "expected"),
    [
        ("k1", 0.1, 0.1),
        ("k2", 0.1, 0.005),
        ("k3", 0.1, 0.0048374),
        ("k3", -0.1, 0.0051709),
        ("low_var_kl", 0.1, 0.0048374),
        ("low_var_kl", -8.0, 10.0),
    ],
)
def test_kl_matches_golden_values(kind, difference, expected):
    base = torch.tensor([-1.0])
    assert approx_kl(base + difference, base, kind).item() == pytest.approx(expected, abs=1e-6)


def test_ratio_multiplies_before_the_cut():
    difference = torch.tensor([-8.0])
    ratio = torch.tensor([0.001])
    raw = math.exp(8) - 1 - 8
    assert approx_kl(difference, torch.zeros(1), "k3", ratio).item() == pytest.approx(0.001 * raw, rel=1e-5)
    assert approx_kl(difference, torch.zeros(1), "low_var_kl", ratio).item() == pytest.approx(0.001 * raw, rel=1e-5)


WEIGHTS = [3.0, 1.0, 0.25]


def mismatch(function, bounds):
    rollout = torch.full((3,), -1.0)
    train = rollout + torch.tensor(WEIGHTS).log()
    return function(torch.ones(3), train, rollout, bounds)


def test_truncation_bounds_the_weight_and_icepop_drops_beyond():
    bounds = MismatchBounds(low=0.5, high=2.0)
    loss, metrics = mismatch(truncated_importance_sampling, bounds)
    torch.testing.assert_close(loss, torch.tensor([2.0, 1.0, 0.5]))
    torch.testing.assert_close(metrics["tis"], torch.tensor(WEIGHTS))
    torch.testing.assert_close(metrics["tis_abs"], torch.tensor([2.0, 0.0, 0.75]))
    assert metrics["tis_clipfrac"].tolist() == [1.0, 0.0, 1.0]
    loss, metrics = mismatch(icepop, bounds)
    torch.testing.assert_close(loss, torch.tensor([0.0, 1.0, 0.0]))
    assert metrics["tis_clipfrac"].tolist() == [1.0, 0.0, 1.0]


def test_weights_carry_no_gradient():
    train = torch.zeros(2, requires_grad=True)
    loss, _ = truncated_importance_sampling(torch.ones(2), train, torch.zeros(2), MismatchBounds())
    assert not loss.requires_grad


@pytest.mark.parametrize(
    ("value", "old", "target", "loss", "is_clipped"),
    [
        (1.0, 0.0, 2.0, (0.2 - 2.0) ** 2, True),
        (0.1, 0.0, 2.0, 1.9**2, False),
        (1.0, 0.0, -1.0, 4.0, False),
    ],
)
def test_value_loss_takes_the_larger_error(value, old, target, loss, is_clipped):
    result, clipped = clipped_value_loss(torch.tensor([value]), torch.tensor([old]), torch.tensor([target]), clip=0.2)
    assert result.item() == pytest.approx(loss)
    assert bool(clipped.item()) is is_clipped


def test_rollouts_count_once_however_they_were_cut():
    values = torch.tensor([1.0, 1.0, 3.0, 3.0, 3.0, 3.0])
    two = sum_of_sample_means([torch.ones(2), torch.ones(4)], [2, 4])
    three = sum_of_sample_means([torch.ones(2), torch.ones(2), torch.ones(2)], [2, 4, 4])
    assert two(values).item() / 2 == 2.0
    assert three(values).item() / 2 == 2.0


def test_per_token_mean_weighs_long_rollouts_more():
    masks = [torch.ones(2), torch.ones(4)]
    values = torch.tensor([1.0, 1.0, 3.0, 3.0, 3.0, 3.0])
    total = sum_of_sample_means(masks, [2, 4], per_token=True)(values)
    assert (total / num_loss_tokens(masks)).item() == pytest.approx(14 / 6)


def test_masked_tokens_contribute_nothing_not_even_nan():
    masks = [torch.tensor([1, 0]), torch.tensor([0])]
    values = torch.tensor([2.0, float("nan"), float("inf")], requires_grad=True)
    total = sum_of_sample_means(masks, [1, 0])(values)
    total.backward()
    assert total.item() == 2.0
    assert values.grad.tolist() == [1.0, 0.0, 0.0]


def test_denominators_default_to_each_samples_own_mask():
    assert sum_of_sample_means([torch.tensor([1, 1, 0])], None)(torch.tensor([1.0, 3.0, 9.0])).item() == 2.0


def test_reducer_of_nothing_is_zero_and_wrong_lengths_are_refused():
    assert sum_of_sample_means([torch.zeros(0)], [5])(torch.zeros(0)).item() == 0.0
    with pytest.raises(ValueError, match="values for"):
        sum_of_sample_means([torch.ones(2)], [2])(torch.ones(3))


def test_scaling_undoes_the_averages_of_megatron():
    """Two micro-batches on each of two data-parallel ranks, four rollouts per step: the result is their mean."""
    means = [[1.0, 2.0], [3.0, 6.0]]
    settings = {"per_token": False, "num_microbatches": 2, "step_global_batch_size": 4, "dp_size": 2, "cp_size": 1}
    per_rank = [sum(scale_for_megatron(torch.tensor(x), **settings).item() / 2 for x in rank) for rank in means]
    assert sum(per_rank) / 2 == 3.0
    settings["per_token"], settings["cp_size"] = True, 2
    assert scale_for_megatron(torch.tensor(5.0), **settings).item() == 10.0
