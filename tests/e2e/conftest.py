"""What the tests of real jobs share: the tiny task, and the end of every job with its test."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.job import JOBS, REPO, model_flags


@pytest.fixture(autouse=True)
def no_job_survives() -> Iterator[None]:
    yield
    while JOBS:
        JOBS.pop().kill_everything()


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny task, its random model, and the converted checkpoint."""
    folder = tmp_path_factory.mktemp("task")
    environment = dict(os.environ) | {"PYTHONPATH": str(REPO)}
    for command in (
        [REPO / "examples/tiny_arithmetic/make_task.py", "--output", folder / "task"],
        [
            REPO / "tools/convert_hf_to_torch_dist.py",
            *model_flags(),
            *("--hf-checkpoint", folder / "task/hf", "--save", folder / "torch_dist"),
        ],
    ):
        subprocess.run([sys.executable, *map(str, command)], check=True, env=environment, timeout=400)
    return folder
