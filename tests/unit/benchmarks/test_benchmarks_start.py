"""Every benchmark starts: its command line parses, and the flags that it passes to train.py are accepted.

No other test runs the benchmarks, so without these a new check in ``slime.flags.parse`` could break one
unnoticed.
"""

from __future__ import annotations

import importlib
import sys
from argparse import Namespace

import pytest

from tests.contracts.source_tree import REPO

FOLDER = REPO / "benchmarks"
PROGRAMS = sorted(path.stem for path in FOLDER.glob("*.py") if "__main__" in path.read_text())
PARTS = {
    "demo_step",
    "model_shapes",
    "phase_table",
    "published_configs",
    "results_page",
    "step_numbers",
    "tower_in_step",
}
"""Modules that the programs import."""


@pytest.fixture(autouse=True)
def path_as_before(monkeypatch):
    """Restore the path, to which benchmarks add the repository."""
    monkeypatch.setattr(sys, "path", [*sys.path])


def load(name: str):
    return importlib.import_module(f"benchmarks.{name}")


def test_every_file_is_a_program_or_a_part_of_one():
    assert {path.stem for path in FOLDER.glob("*.py")} == {*PROGRAMS, *PARTS}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_command_line_is_explained(name, monkeypatch, capsys):
    module = load(name)
    monkeypatch.setattr(sys, "argv", [str(FOLDER / f"{name}.py"), "--help"])
    with pytest.raises(SystemExit) as end:
        module.main()
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: {name}.py")


@pytest.mark.parametrize(
    ("model", "num_gpus", "extra"),
    [
        ("qwen3-1.7B", 1, ""),
        ("qwen3-4B", 2, "--tensor-model-parallel-size 2 --sequence-parallel"),
        ("glm4-9B", 1, ""),
        ("qwen3-30B-A3B", 4, "--expert-model-parallel-size 4"),
        ("moonlight", 1, ""),
        ("qwen3-4B", 1, "--lora-rank 32"),
        ("qwen3-vl-8B", 1, "--train-vision-tower"),
    ],
)
def test_the_flags_of_the_trainers_benchmarks_are_accepted(model, num_gpus, extra, tmp_path):
    options = Namespace(model=model, tokens=1024, layers=4)
    args = load("train_mfu").trainer_args(options, extra.split(), num_gpus, str(tmp_path))
    assert (args.actor_num_gpus_per_node, args.num_layers) == (num_gpus, 4)
