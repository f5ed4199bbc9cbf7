"""The control plane survives schedules of faults, runs are repeatable, and a bug that is put back makes one fail."""

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

LIMIT_S = 900
pytestmark = pytest.mark.timeout(LIMIT_S + 20)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Any]:
    """From one process for all tests, because it replaces clocks, threads and files."""
    command = [sys.executable, "-m", "tests.simulator", "--suite"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=REPO, env=environment, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_a_slice_of_the_schedules_has_no_failure(outcomes):
    slices = outcomes["slices"]
    assert [one for one in slices if one["violations"]] == []
    assert sum(one["faults"] for one in slices) > 50 and sum(one["lives"] for one in slices) > 55


@pytest.mark.parametrize("name", PAST)
def test_a_schedule_that_once_failed_passes(outcomes, name):
    violations, all_struck, went_on = outcomes["past"][name]
    assert violations == [] and all_struck and went_on


def test_a_seed_tells_the_same_story_twice(outcomes):
    first, second = outcomes["stories"]
    assert first == second and "fault:" in "".join(first) and "trained on rollout 2" in "".join(first)


@pytest.mark.parametrize("driver", ["synchronous", "one_rollout_ahead"])
def test_a_driver_of_the_users_own_written_against_upstreams_names_trains(outcomes, driver):
    violations, story = outcomes["drivers"][driver]
    assert violations == [] and "trained on rollout 3" in "".join(story) and story[-1].endswith("ended with 0")


def test_a_bug_that_is_put_back_is_found_and_shrunk(outcomes):
    assert outcomes["bug"] is not None and outcomes["bug"]["faults"]


@pytest.mark.parametrize("bug", BUGS)
def test_every_bug_fits_the_code_as_it_is(bug):
    for mutation in BUGS[bug]:
        assert mutation.why_it_does_not_apply() == ""
