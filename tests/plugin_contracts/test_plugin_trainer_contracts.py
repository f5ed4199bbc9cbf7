"""Losses, advantages, hooks of the training step: the plug-in given by path, else the example, keeps its contract."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script

from tests.plugin_contracts.suite import check_contract, importable, model_folder, run_as_script  # noqa: E402, F401

FLAGS = (
    "--custom-advantage-function-path",
    "--custom-loss-function-path",
    "--custom-tis-function-path",
    "--custom-pg-loss-reducer-function-path",
    "--custom-megatron-init-path",
    "--custom-megatron-before-log-prob-hook-path",
    "--custom-megatron-before-train-step-hook-path",
)


@pytest.mark.usefixtures("importable")
@pytest.mark.parametrize("flag", FLAGS)
def test_the_plug_in_keeps_its_contract(flag: str, model_folder: Path) -> None:  # noqa: F811
    check_contract(flag, model_folder)


if __name__ == "__main__":
    run_as_script()
