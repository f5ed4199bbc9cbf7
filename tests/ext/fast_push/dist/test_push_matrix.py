"""The fast slice of the push matrix: every way into SGLang's own models, plain and in fp8 (``make push-matrix``)."""

from __future__ import annotations

import pytest

from tests.matrix.case import load_cases
from tests.push_matrix.cells import FAST, MODES, run_cells

pytestmark = [pytest.mark.dist, pytest.mark.timeout(1800)]


def test_every_mode_gives_the_engine_what_its_own_loader_makes_of_the_checkpoint() -> None:
    cells = run_cells(list(load_cases(FAST["families"]).values()), modes=MODES, **FAST["chosen"])
    assert len(cells) == 2 * 2 * len(MODES), "two layouts, with and without quantisation"
    assert [cell.describe() for cell in cells if cell.problem] == []
    digests = {(cell.quantization, cell.digest) for cell in cells}
    assert len(digests) == 2, "one digest for each quantisation, whatever the way"
