"""Quantized checkpoints of every family: the converter against the export, and refusals."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime.ext.low_precision.folders.run import rewrite_folder
from slime.ext.low_precision.folders.to_quantized import to_fp8
from slime.utils.errors import ConfigError
from tests.matrix.case import load_cases
from tests.matrix.layouts import OF_OTHERS
from tests.matrix.quantized import PUBLISHED, RECIPES, check_quantized
from tests.matrix.report import summary


def test_experts_stacked_beside_their_biases_are_refused(tmp_path: Path) -> None:
    names = [name for name, case in load_cases().items() if not case.has_quantized_form]
    assert names == ["gpt_oss"]
    load_cases(["gpt_oss"])["gpt_oss"].write_checkpoint(tmp_path / "plain")
    with pytest.raises(ConfigError, match=r"biases beside stacked experts"):
        rewrite_folder(to_fp8("block", (32, 16)), tmp_path / "plain", tmp_path / "fp8")


FAMILIES = [name for name, case in load_cases().items() if case.has_quantized_form and name not in OF_OTHERS]


@pytest.mark.parametrize("family", FAMILIES)
def test_exported_bytes_are_the_converters_and_loaded_values_those_that_they_stand_for(family: str) -> None:
    cells = check_quantized(load_cases([family])[family], "block")
    assert len(cells) == 2
    assert all(cell.passed for cell in cells), summary(cells)


@pytest.mark.parametrize("recipe", [recipe for recipe in RECIPES if recipe != "block"])
def test_so_it_is_in_every_format(recipe: str) -> None:
    """GLM-5.2: latent attention, an indexer in some layers, experts, an MTP layer with copies."""
    cells = check_quantized(load_cases(["glm5_2"])["glm5_2"], recipe, converts=recipe == "channel")
    assert all(cell.passed for cell in cells), summary(cells)


def test_a_form_of_two_widths_is_made_as_it_is_published() -> None:
    """DeepSeek-V4: FP8 layers, FP4 experts, one-byte scales; the case rounds in another way."""
    cells = check_quantized(load_cases(["deepseek_v4-fp4"])["deepseek_v4-fp4"], PUBLISHED, converts=True)
    assert len(cells) == 3
    assert all(cell.passed for cell in cells), summary(cells)
