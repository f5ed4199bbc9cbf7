"""Eval, rewards, filters, sources, sample hooks: the plug-in given by path, else the example, keeps its contract."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script

from tests.plugin_contracts.suite import check_contract, importable, model_folder, run_as_script  # noqa: E402, F401

FLAGS = (
    "--eval-function-path",
    "--custom-rm-path",
    "--dynamic-sampling-filter-path",
    "--buffer-filter-path",
    "--data-source-path",
    "--rollout-sample-filter-path",
    "--rollout-all-samples-process-path",
    "--rollout-sample-hook-path",
)


@pytest.mark.usefixtures("importable")
@pytest.mark.parametrize("flag", FLAGS)
def test_the_plug_in_keeps_its_contract(flag: str, model_folder: Path) -> None:  # noqa: F811
    check_contract(flag, model_folder)


if __name__ == "__main__":
    run_as_script()
