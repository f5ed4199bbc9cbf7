"""Gradients against finite differences in float64: of the trainer's whole loss, and of its float32 parts."""

import pytest
import torch

from slime.algorithms.policy_losses.gspo import sequence_log_ratio
from slime.algorithms.reduction import sum_of_sample_means
from slime.algorithms.value_loss import clipped_value_loss
from tests.matrix.pool import RankPool
from tests.oracle.finite_differences import BOUND, differences_of

IN_THE_SUITE = (
    "grpo",
    "gspo",
    "cispo",
    "dual_clip",
    "opsm",
    "per_token",
    "reused_log_probs",
    "sft",
    "tis_reused",
    "top_p",
    "unbiased_kl",
    "mis_sequence",
)
"""A subset; ``python -m tests.algorithms`` runs all of them."""


@pytest.fixture(scope="module")
def differences():
    with RankPool() as pool:
        return differences_of(pool, IN_THE_SUITE)


@pytest.mark.dist
@pytest.mark.parametrize("variant", IN_THE_SUITE)
def test_the_gradient_of_the_trainers_loss_is_the_slope_of_that_loss(differences, variant):
    assert differences[variant] < BOUND


def random_row(seed, length=40):
    return torch.randn(length, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_value_loss():
    values, old, target = random_row(0).requires_grad_(), random_row(1), random_row(2)
    assert torch.autograd.gradcheck(lambda v: clipped_value_loss(v, old, target, clip=0.2)[0], [values])


def test_sequence_ratio():
    rows = [random_row(seed, length).requires_grad_() for seed, length in ((0, 5), (1, 1), (2, 9))]
    masks = [torch.tensor([1, 0, 1, 1, 0]), torch.tensor([0]), torch.ones(9)]
    old = [row.detach() + 0.1 for row in rows]
    assert torch.autograd.gradcheck(lambda *found: sequence_log_ratio(found, old, masks), rows)


@pytest.mark.parametrize("per_token", [False, True])
def test_reduction(per_token):
    masks = [torch.tensor([1, 0, 1, 1]), torch.tensor([0, 0]), torch.tensor([1])]
    reduce = sum_of_sample_means(masks, [4, 0, 4], per_token=per_token)
    assert torch.autograd.gradcheck(lambda values: reduce(values), [random_row(0, 7).requires_grad_()])
