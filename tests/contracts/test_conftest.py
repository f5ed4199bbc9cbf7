"""A test that exceeds its limit fails alone, and the processes that it started end with it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import psutil

CONFTEST = Path(__file__).parents[1] / "conftest.py"
INNER = """
import subprocess, sys, time
from pathlib import Path
import pytest

FOLDER = Path(__file__).parent
SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]

@pytest.fixture(scope="module")
def shared():
    process = subprocess.Popen(SLEEP)
    time.sleep(1)
    yield process
    process.kill()
    process.wait()

def test_first(shared):
    pass

@pytest.mark.timeout(3)
def test_hangs(shared):
    # The shell ends at once and leaves its child, in a session of its own, to init.
    shell = f"setsid {sys.executable} -c 'import time; time.sleep(600)' >/dev/null 2>&1 & echo $!"
    orphan = subprocess.run(["bash", "-c", shell], stdout=subprocess.PIPE, text=True, check=True).stdout
    (FOLDER / "orphan").write_text(orphan)
    time.sleep(600)

def test_after(shared):
    assert shared.poll() is None, "the process of a fixture ended with another test"
"""


def test_a_hanging_test_fails_alone_and_its_processes_end(tmp_path: Path) -> None:
    shutil.copy(CONFTEST, tmp_path / "conftest.py")
    (tmp_path / "test_inner.py").write_text(INNER)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "timeout_method=signal"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    run = subprocess.run(
        [*command, "--rootdir", tmp_path, tmp_path], capture_output=True, text=True, timeout=200, env=environment
    )
    assert "1 failed, 2 passed" in run.stdout, run.stdout + run.stderr
    assert not psutil.pid_exists(int((tmp_path / "orphan").read_text()))
