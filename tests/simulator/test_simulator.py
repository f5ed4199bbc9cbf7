"""The control plane survives schedules of faults, tells a story twice alike, and fails when a bug is put back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.contracts.source_tree import REPO
from tests.simulator.bugs import BUGS
from tests.simulator.past import PAST

pytestmark = pytest.mark.timeout(240)


def simulate(*words: str) -> tuple[int, str]:
    """Run the command in a process of its own: it replaces clocks, threads and files."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.simulator", "--workers", "1", *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPO, env=environment, timeout=220, check=False)
    return done.returncode, done.stdout + done.stderr[-3000:]


def test_a_slice_of_the_schedules_has_no_failure():
    code, output = simulate("--schedules", "50", "--seed", "1000000")
    summary: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
    assert code == 0 and not summary["failed"], output
    assert summary["faults"] > 50 and summary["lives"] > 55


def test_schedules_that_once_failed_pass():
    code, output = simulate("--past")
    assert code == 0 and output.count(": ok") == len(PAST), output


def test_a_seed_tells_the_same_story_twice():
    told = [simulate("--story", "10") for _ in range(2)]
    assert told[0] == told[1] and "fault:" in told[0][1] and "trained on rollout 2" in told[0][1]


def test_a_bug_that_is_put_back_is_found_and_shrunk():
    bug = next(iter(BUGS))
    code, output = simulate("--bugs", "--bug", bug, "--schedules", "400")
    assert code == 0 and "found" in output, output


@pytest.mark.parametrize("bug", BUGS)
def test_every_bug_fits_the_code_as_it_is(bug):
    for mutation in BUGS[bug]:
        assert mutation.why_it_does_not_apply() == ""
