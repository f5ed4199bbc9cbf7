"""Fixtures of real jobs: the tiny task, and the end of every job with its test."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.job import JOBS, make_task


@pytest.fixture(autouse=True)
def no_job_survives() -> Iterator[None]:
    yield
    while JOBS:
        job = JOBS.pop()
        job.kill_everything()
        print(f"The end of {job.log}:\n{job.text()[-6000:]}")  # pytest shows it if the test failed


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny task, its random model, and the converted checkpoint; pytest-xdist workers share them."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "task"
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        make_task(folder)
    return folder
