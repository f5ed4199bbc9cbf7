"""Every model family in one process: log-probs and gradients of the reference, checkpoints there and back bit for bit.

`python -m tests.matrix` prints the same cells with their numbers, and those of all parallel layouts.
"""

from __future__ import annotations

import pytest

from tests.matrix.case import load_cases
from tests.matrix.isolation import check_families
from tests.matrix.report import CHECKS, summary


@pytest.mark.dist
@pytest.mark.parametrize("family", load_cases())
def test_the_family_equals_its_reference(family: str) -> None:
    cells = list(check_families([family], CHECKS))
    assert len(cells) == len(CHECKS)
    assert all(cell.passed for cell in cells), summary(cells)
