"""What the suite leaves out of the matrix is there, and others have its rules of weights."""

from __future__ import annotations

from slime.backends.megatron_utils.models import family_of
from tests.matrix.case import load_cases
from tests.matrix.layouts import CUT_IN_SUITE, OF_OTHERS


def tables(names: set[str]) -> set[str]:
    families = [family_of(case.config) for name, case in load_cases().items() if name in names]
    return {family.weight_map.family for family in families if family is not None}


def test_the_suite_has_every_table_of_weights_in_one_process() -> None:
    names = set(load_cases())
    assert tables(names - set(OF_OTHERS)) == tables(names)
    assert set(CUT_IN_SUITE) < names - set(OF_OTHERS)
