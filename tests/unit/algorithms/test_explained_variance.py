"""The share of the returns' variance that a critic explains."""

from __future__ import annotations

import pytest
import torch

from slime.algorithms.value_loss import explained_variance, explained_variance_sums


def measure(values, returns, masks=None) -> float:
    as_tensors = [[torch.tensor(row) for row in table] for table in (values, returns)]
    masks = [torch.tensor(row) for row in masks] if masks else [torch.ones(len(row)) for row in values]
    return explained_variance(explained_variance_sums(*as_tensors, masks))


def test_one_for_a_perfect_critic_zero_for_a_constant_one_less_for_a_wrong_one():
    returns = [[0.0, 1.0], [2.0, 3.0]]
    assert measure(returns, returns) == 1
    assert measure([[1.5, 1.5], [1.5, 1.5]], returns) == pytest.approx(0)
    assert measure([[0.0, 0.5], [1.0, 1.5]], returns) == pytest.approx(
        0.75
    )  # residuals have half the deviation, a quarter of the variance
    assert measure([[3.0, 2.0], [1.0, 0.0]], returns) == pytest.approx(-3)


def test_an_offset_costs_nothing_and_masked_tokens_do_not_count():
    assert measure([[10.0, 11.0, 0.0]], [[0.0, 1.0, 99.0]], [[1, 1, 0]]) == pytest.approx(1)


def test_ranks_add_up():
    parts = [([0.0, 0.5], [0.0, 1.0]), ([1.0, 1.5], [2.0, 3.0])]
    sums = [explained_variance_sums([torch.tensor(v)], [torch.tensor(r)], [torch.ones(2)]) for v, r in parts]
    assert explained_variance(sums[0] + sums[1]) == pytest.approx(0.75)


def test_nothing_to_explain_is_zero():
    assert measure([[1.0, 2.0]], [[1.0, 1.0]]) == 0
    assert measure([[1.0]], [[1.0]], [[0]]) == 0
