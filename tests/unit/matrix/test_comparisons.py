"""The matrix's comparisons find differences, on tensors whose answer is known by hand."""

from __future__ import annotations

import math

import pytest
import torch

from tests.matrix.case import gradients_by_checkpoint_name
from tests.matrix.comparisons import differing_tensors, gradient_errors


def test_the_error_of_a_gradient_is_relative_to_its_own_norm() -> None:
    expected = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([0.0, 12.0])}
    actual = {"a": torch.tensor([3.0, 4.5]), "b": torch.tensor([0.0, 12.0])}
    assert gradient_errors(actual, expected) == pytest.approx({"a": 0.1, "b": 0.0})


def test_a_tiny_gradient_is_measured_against_a_thousandth_of_the_global_norm() -> None:
    expected = {"a": torch.tensor([1000.0]), "tiny": torch.tensor([1e-6])}
    actual = {"a": torch.tensor([1000.0]), "tiny": torch.tensor([1e-3])}
    assert gradient_errors(actual, expected)["tiny"] == pytest.approx(1e-3, rel=1e-2)


def test_a_gradient_on_one_side_only_counts_unless_it_is_zero() -> None:
    one = torch.ones(2)
    errors = gradient_errors({"a": one, "frozen": torch.zeros(2), "extra": one}, {"a": one, "lost": one})
    assert errors == {"a": 0.0, "lost (on one side only)": math.inf, "extra (on one side only)": math.inf}


@pytest.mark.parametrize(
    ("actual", "problem"),
    [
        ({}, "w is missing"),
        ({"w": torch.tensor([0.0]), "v": torch.tensor([0.0])}, "v is too many"),
        ({"w": torch.tensor([0.0], dtype=torch.bfloat16)}, "w is torch.bfloat16 instead of torch.float32"),
        ({"w": torch.tensor([[0.0]])}, "w is (1, 1) instead of (1,)"),
        ({"w": torch.tensor([-0.0])}, "w differs by 0"),
        ({"w": torch.tensor([0.25])}, "w differs by 0.25"),
    ],
)
def test_tensors_are_compared_bit_for_bit(actual: dict[str, torch.Tensor], problem: str) -> None:
    assert differing_tensors(actual, {"w": torch.tensor([0.0])}) == [problem]


def test_the_gradients_of_a_plain_reference_keep_their_names() -> None:
    model = torch.nn.Linear(2, 3, bias=True)
    model(torch.ones(2)).sum().backward()
    model.bias.grad = None
    gradients = gradients_by_checkpoint_name(model)
    assert gradients["weight"].tolist() == [[1.0, 1.0]] * 3
    assert gradients["bias"].tolist() == [0.0] * 3
