"""Logs of engines: where they are, and when they go."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import pytest

from slime.backends.sglang_utils import process_logs

DAY_S = 86400.0


@pytest.fixture
def temp(monkeypatch, tmp_path) -> Path:
    monkeypatch.delenv("SLIME_LOG_DIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    process_logs.run_name.cache_clear()
    yield tmp_path
    process_logs.run_name.cache_clear()


def make_run(base: Path, name: str, age_s: float) -> Path:
    folder = base / name
    folder.mkdir(parents=True)
    log = folder / "engine.log"
    log.write_text("x")
    for path in (log, folder):
        os.utime(path, (time.time() - age_s,) * 2)
    return folder


def test_only_the_last_runs_stay(tmp_path):
    runs = [make_run(tmp_path, f"run-{i}", age_s=DAY_S * (i + 1)) for i in range(5)]
    assert sorted(process_logs.remove_old_runs(tmp_path, keep=2)) == runs[2:]
    assert sorted(tmp_path.iterdir()) == runs[:2]


def test_a_run_that_still_writes_stays_however_old_it_is(tmp_path):
    old = make_run(tmp_path, "run-old", age_s=10 * DAY_S)
    make_run(tmp_path, "run-new", age_s=DAY_S)
    (old / "engine.log").write_text("still here")
    assert process_logs.remove_old_runs(tmp_path, keep=0) == [tmp_path / "run-new"]
    assert old.is_dir()


def test_logs_from_before_there_were_runs_go_too_and_other_files_stay(tmp_path):
    for name in ("engine_0.abc.log", "notes.txt"):
        (tmp_path / name).write_text("x")
        os.utime(tmp_path / name, (time.time() - DAY_S,) * 2)
    process_logs.remove_old_runs(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_new_run_makes_its_folder_and_clears_away(temp, monkeypatch):
    base = temp / f"slime-{os.getuid()}"
    for i in range(process_logs.KEEP_RUNS + 3):
        make_run(base, f"run-{i:02}", age_s=DAY_S * (i + 1))
    monkeypatch.setenv("SLIME_LOG_RUN", "run-of-the-job")
    log = process_logs.new_log_file("engine 0 [::1]:1")
    assert log.parent == base / "run-of-the-job" and log.name.startswith("engine_0____1__1.")
    assert len(list(base.iterdir())) == process_logs.KEEP_RUNS
    assert process_logs.new_log_file("router").parent == log.parent


def test_the_users_own_folder_is_left_as_it_is(temp, monkeypatch):
    mine = temp / "mine"
    old = make_run(mine, "run-old", age_s=9 * DAY_S)
    monkeypatch.setenv("SLIME_LOG_DIR", str(mine))
    assert process_logs.new_log_file("x").parent == mine
    assert old.is_dir()
