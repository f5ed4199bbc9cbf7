"""The matrix tells what differs: its measures on tensors whose answer is known by hand."""

from __future__ import annotations

import math

import pytest
import torch

from tests.matrix.case import FamilyCase, gradients_by_checkpoint_name, load_cases
from tests.matrix.comparisons import differing_tensors, gradient_errors
from tests.matrix.docs import result_tables
from tests.matrix.report import Cell, summary


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


def test_a_gradient_that_is_not_a_number_is_an_error() -> None:
    cell = Cell("f", "gradients", gradient_errors({"a": torch.tensor([math.nan])}, {"a": torch.ones(1)})["a"], 1e-4)
    assert not cell.passed


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


def test_a_failure_is_described_with_family_tensor_number_and_bound() -> None:
    cells = [Cell("qwen3", "gradients", 0.5, 1e-4, "lm_head.weight"), Cell("qwen3", "log-probs", 1e-6, 2e-5)]
    assert "FAILED qwen3 / gradients: 0.5 (bound 0.0001), lm_head.weight" in summary(cells)
    assert "1 of 2 cells passed" in summary(cells)


def test_tables_have_families_down_or_layouts_down_where_there_are_many() -> None:
    cells = [
        Cell("qwen3", "gradients", 0.5, 1e-4),
        Cell("qwen3", "round trip", 0, 0),
        Cell("qwen3", "TP2", 1e-6, 1e-5, kind="layout"),
        Cell("qwen3", "PP4", 2e-6, 1e-5, kind="layout"),
        Cell("mimo", "TP2", 3e-6, 1e-5, kind="layout"),
    ]
    tables = result_tables(cells, ["mimo", "qwen3"], ["qwen3"], ["TP2", "PP2", "PP4"])
    assert tables["checks"].splitlines()[2:] == ["| qwen3 | **5.0e-01** | equal |"]
    assert tables["families in layouts"].splitlines()[2:] == ["| mimo | 3.0e-06 |", "| qwen3 | 1.0e-06 |"]
    assert tables["layouts in full"].splitlines()[2:] == ["| TP2 | 1.0e-06 |", "| PP4 | 2.0e-06 |"]


def test_the_gradients_of_a_plain_reference_keep_their_names() -> None:
    model = torch.nn.Linear(2, 3, bias=True)
    model(torch.ones(2)).sum().backward()
    model.bias.grad = None
    gradients = gradients_by_checkpoint_name(model)
    assert gradients["weight"].tolist() == [[1.0, 1.0]] * 3
    assert gradients["bias"].tolist() == [0.0] * 3


def test_every_family_is_awkward() -> None:
    for case in load_cases().values():
        assert isinstance(case, FamilyCase)
        assert case.vocab_size % 8, f"{case.name}: a vocabulary of {case.vocab_size} needs no padding"
        assert case.config["num_hidden_layers"] % 2, f"{case.name}: an odd number of layers is the harder one"
        assert case.about, f"{case.name}: say what is awkward about it"


def test_an_unknown_family_is_named_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"no family gpt5; there are .*qwen3"):
        load_cases(["gpt5"])
