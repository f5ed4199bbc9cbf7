"""The tables of results."""

import math

import torch

from tests.algorithms.tables import markdown, mutation_table, oracle_table
from tests.mutations.mutation import Mutation
from tests.mutations.runner import Outcome, Verdict
from tests.oracle.agreement import Errors, relative_error


def test_worst_errors_stand_in_the_table_and_failures_are_counted():
    cells = {("dp2", "grpo", "dynamic", seed): Errors(1e-7 * seed, 2e-7, 3e-7) for seed in (1, 2)}
    table = oracle_table(cells | {("cp2", "grpo", "dynamic", 1): Errors(gradient=math.inf)}, {"grpo": 1e-10}, 1e-8)
    assert "3 cells" in table and "1 out of bounds" in table
    assert "| `grpo` | 2e-07 | 2e-07 | inf | 1e-10 |" in table
    assert "| cp2 | 1 | 0 | 0 | inf |" in table


def test_a_bug_that_one_of_its_checks_misses_is_not_caught():
    mutation = Mutation(bug="b | c", target="m:f", old="", new="", tests=("t.py::test_it_is_so[1]",))
    caught = Verdict("t.py::test_it_is_so[1]", True, True, "boom")
    missed = Verdict("oracle:dp2_cp2:grpo", True, False, "")
    table = mutation_table([Outcome(mutation, (caught,)), Outcome(mutation, (caught, missed))])
    assert "1 of 2 are caught" in table
    assert "| b \\| c | `f` | `t`: it is so | yes |" in table
    assert "| b \\| c | `f` | `t`: it is so, oracle, dp2 cp2: `grpo` | **no** |" in table


def test_what_is_not_finite_or_has_another_shape_is_infinitely_wrong():
    one = torch.ones(2)
    assert relative_error(one, one) == 0.0
    assert relative_error(torch.tensor([1.0, math.nan]), one) == relative_error(torch.ones(3), one) == math.inf
    assert not Errors(metrics=math.nan).within_bounds() and markdown(["a"], [["b"]]) == "| a |\n| --- |\n| b |"
