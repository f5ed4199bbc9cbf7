"""Every model family: the reference's log-probs and gradients, bitwise checkpoints, two ranks against one process.

`python -m tests.matrix` prints the same cells with their numbers, and many more parallel layouts.  `make test` skips
those marked ``whole``.
"""

from __future__ import annotations

from collections.abc import Collection

import pytest
from _pytest.mark.structures import ParameterSet

from tests.matrix.case import load_cases
from tests.matrix.layouts import CUT_IN_SUITE, OF_OTHERS, fast_layouts_of, run_layouts
from tests.matrix.parity import check_families
from tests.matrix.pool import MAX_PATIENCE
from tests.matrix.report import CHECKS, summary

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300 * MAX_PATIENCE)]
CASES = load_cases()


def families(in_suite: Collection[str]) -> list[ParameterSet]:
    """All families; those that the suite skips are marked."""
    return [pytest.param(name, marks=[pytest.mark.whole] * (name not in in_suite)) for name in CASES]


@pytest.mark.parametrize("family", families(CASES.keys() - OF_OTHERS))
def test_one_process_equals_the_reference(family: str) -> None:
    cells = list(check_families([family], CHECKS))
    assert len(cells) == len(CHECKS)
    assert all(cell.passed for cell in cells), summary(cells)


@pytest.mark.parametrize("family", families(CUT_IN_SUITE))
def test_two_ranks_equal_one_process(family: str) -> None:
    case = CASES[family]
    names = fast_layouts_of(case)
    cells = run_layouts([case], names)
    assert [cell.column for cell in cells] == names
    assert all(cell.passed for cell in cells), summary(cells)
