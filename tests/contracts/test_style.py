"""The checks of pyproject.toml that need no run of the code: lint, format, types."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
TIMEOUT_S = 300


@pytest.mark.parametrize("command", ["ruff check", "ruff format --check", "mypy"])
def test_the_tree_passes(command: str, tmp_path: Path) -> None:
    words = [*command.split(), "--cache-dir", str(tmp_path)]
    run = subprocess.run(
        [sys.executable, "-m", *words], cwd=REPO, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
