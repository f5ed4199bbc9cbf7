"""One matrix product per expert: against fp64, with experts that have no token at all."""

from __future__ import annotations

import pytest
import torch

from slime.backends.megatron_utils.layers.experts import grouped_linear, has_grouped_product

COUNTS = [3, 0, 7, 1, 0]


def test_each_expert_multiplies_its_own_rows_and_gradients_are_those_of_autograd() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(11, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, 4, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(11, 4, generator=generator, dtype=torch.float64)
    expected = torch.cat([rows @ matrix.t() for rows, matrix in zip(x.split(COUNTS), weight)])
    expected_grads = torch.autograd.grad(expected, (x, weight), grad)

    y = grouped_linear(x, weight, torch.tensor(COUNTS), use_grouped_product=True)
    torch.testing.assert_close(y, expected)
    for actual, wanted in zip(torch.autograd.grad(y, (x, weight), grad), expected_grads):
        torch.testing.assert_close(actual, wanted)


def test_an_expert_without_tokens_has_a_zero_gradient_not_none() -> None:
    weight = torch.ones(2, 3, 4, requires_grad=True)
    grouped_linear(torch.ones(5, 4), weight, torch.tensor([5, 0]), use_grouped_product=False).sum().backward()
    assert weight.grad is not None and not weight.grad[1].any() and (weight.grad[0] == 5).all()


def test_a_rank_whose_experts_get_no_tokens_still_has_gradients() -> None:
    x, weight = torch.ones(0, 4, requires_grad=True), torch.ones(2, 3, 4, requires_grad=True)
    grouped_linear(x, weight, torch.tensor([0, 0]), use_grouped_product=True).sum().backward()
    assert x.grad is not None and weight.grad is not None and not weight.grad.any()


def test_a_frozen_matrix_gets_no_gradient() -> None:
    x, weight = torch.ones(3, 4, requires_grad=True), torch.ones(1, 2, 4)
    grouped_linear(x, weight, torch.tensor([3]), use_grouped_product=False).sum().backward()
    assert weight.grad is None and (x.grad == 2).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_grouped_kernel_is_not_asked_for_on_the_cpu(dtype: torch.dtype) -> None:
    assert not has_grouped_product(torch.ones(8, 16, dtype=dtype), torch.ones(2, 16, 16, dtype=dtype))
