"""docs/algorithms.md lists every algorithm, and the tables of names agree with each other."""

from __future__ import annotations

import dataclasses
import re

import pytest

from examples.train_infer_mismatch_helper.formulas import MisConfig
from slime.algorithms.advantages import ESTIMATORS
from slime.algorithms.kl import KL_KINDS
from slime.algorithms.off_policy import TOKEN_CORRECTIONS
from slime.algorithms.policy_losses import POLICY_LOSSES
from slime.backends.megatron_utils.loss import LOSSES
from slime.flags.algorithm import LOSS_TYPES
from tests.contracts.source_tree import REPO

PAGE = (REPO / "docs/algorithms.md").read_text(encoding="utf-8")
FILES = {
    "slime/algorithms/advantages": ("inputs.py",),
    "slime/algorithms/policy_losses": ("inputs.py",),
    "slime/algorithms/off_policy": ("weights.py",),
}
"""Folders with one algorithm per file -> the files that hold shared code."""


@pytest.mark.parametrize(
    "name",
    [*ESTIMATORS, *KL_KINDS, *LOSS_TYPES, *(field.name for field in dataclasses.fields(MisConfig))],
)
def test_every_name_that_a_user_may_give_is_on_the_page(name):
    assert f"`{name}`" in PAGE


@pytest.mark.parametrize("folder", FILES)
def test_every_algorithm_has_its_file_on_the_page(folder):
    files = {path.name for path in (REPO / folder).glob("*.py")} - {"__init__.py", *FILES[folder]}
    assert files and sorted(name for name in files if f"{name}`" not in PAGE) == []


def test_every_estimator_uses_a_registered_loss_and_every_loss_type_has_its_function():
    assert all(estimator.policy_loss in POLICY_LOSSES.values() for estimator in ESTIMATORS.values())
    assert LOSSES.keys() == LOSS_TYPES.keys()
    assert [function.__name__ for function in LOSSES.values() if f"`{function.__name__}`" not in PAGE] == []
    assert set(TOKEN_CORRECTIONS) == {"tis", "icepop"}


def test_every_formula_names_its_source():
    lacking = []
    for folder in ("advantages", "policy_losses", "off_policy"):
        for path in sorted((REPO / "slime/algorithms" / folder).glob("*.py")):
            if path.name not in ("__init__.py", "inputs.py", "weights.py", "whitening.py"):
                text = path.read_text(encoding="utf-8")
                if not re.search(r"Source: [\s\S]{,250}?(arXiv|20\d\d)", text):
                    lacking.append(path.name)
    assert lacking == []
