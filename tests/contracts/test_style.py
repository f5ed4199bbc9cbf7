"""The static checks of pyproject.toml: lint, format, types."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.contracts.source_tree import REPO

TIMEOUT_S = 900
"""For mypy, which takes half a minute on an idle machine, at a load of 30."""


@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("command", ["ruff check", "ruff format --check", "mypy"])
def test_the_tree_passes(command: str) -> None:
    words = [sys.executable, "-m", *command.split()]
    run = subprocess.run(words, cwd=REPO, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
