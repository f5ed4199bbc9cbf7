"""The matrix cells that the suite skips exist, and results name what was measured."""

from __future__ import annotations

from slime.backends.megatron_utils.models import family_of
from tests.matrix import docs
from tests.matrix.case import load_cases
from tests.matrix.layouts import CUT_IN_SUITE, OF_OTHERS
from tests.matrix.report import Cell


def tables(names: set[str]) -> set[str]:
    families = [family_of(case.config) for name, case in load_cases().items() if name in names]
    return {family.weight_map.family for family in families if family is not None}


def test_the_suite_has_every_table_of_weights_in_one_process() -> None:
    names = set(load_cases())
    assert tables(names - set(OF_OTHERS)) == tables(names)
    assert set(CUT_IN_SUITE) < names - set(OF_OTHERS)


def test_results_name_no_family_and_no_layout_that_was_not_measured() -> None:
    cells = [Cell("qwen3", "gradients", 0.0, 0.0), Cell("qwen3", "TP2", 1.0, 0.0, kind="layout")]
    tables = docs.reference_tables(cells, load_cases(), {"DP2": (), "TP2": ("--tensor-model-parallel-size", 2)})
    rows = {title: [line.split(" | ")[0] for line in text.splitlines()[2:]] for title, text in tables.items()}
    assert rows == {"families": ["| qwen3"], "flags of the layouts": ["| TP2"]}
    assert docs.counts(cells) == {"qwen3": "1 of 2 cells"}
    assert set(docs.reference_tables(cells[:1], load_cases(), {"DP2": ()})) == {"families"}
