"""The benchmark beside verl: flags, logs, table, file of results.  It needs no verl here, and times nothing."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path

import psutil
import pytest

from benchmarks import results_page
from benchmarks.peers import run

CHILD = "import subprocess, sys; print(subprocess.Popen(['sleep', '300'], start_new_session=True).pid, flush=True)"


def options(folder: Path, monkeypatch: pytest.MonkeyPatch, *more: str) -> Namespace:
    words = ["--out", str(folder), "--shape", "tiny", "--prompts", "2", "--samples", "4", "--median", "24"]
    monkeypatch.setattr(
        sys, "argv", ["run.py", *words, "--cap", "32", "--sides", "slime", "--steps", "4", "--warm-up", "1", *more]
    )
    return run.parse_options()


def slime_lines(step: int) -> list[dict]:
    """The records of a step, with the keys of a real job; the sleep of a step stands in the record after it."""
    train = {"perf/time_ref_log_probs_s": 0.5, "perf/time_actor_train_s": 2.0, "perf/time_wake_up_s": 0.25}
    late = {} if step == 0 else {"perf/time_sleep_s": float(step)}
    return [
        {"rollout/step": step, "rollout/rewards": 0.5, "perf/time_rollout_s": 3.0},
        {"train/step": step, "train/loss": 0.1},
        {"rollout/step": step, **train, **late, "perf/train_peak_memory_gib": 30.0 + step},
        {"rollout/step": step, "perf/time_wait_for_rollout_s": 4.0, "perf/time_push_s": 0.5, "perf/time_step_s": 9.0},
    ]


def write_lines(path: Path, lines: list[dict], rest: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + rest)
    return path


def test_the_command_line_is_explained(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["run.py", "--help"])
    with pytest.raises(SystemExit) as end:
        run.main()
    assert end.value.code == 0 and capsys.readouterr().out.startswith("usage: run.py")


def test_a_side_that_does_not_end_is_ended_with_its_children_and_the_result_is_a_page(monkeypatch, tmp_path):
    monkeypatch.setattr(run, "LEAVE_S", 0.2)
    made = options(tmp_path, monkeypatch, "--steps", "2")
    lines = [line for step in range(2) for line in slime_lines(step)]
    write_lines(tmp_path / "slime/runs/a/metrics.jsonl", lines[:4])
    late = f"open('runs/a/metrics.jsonl', 'a').write({''.join(json.dumps(line) + chr(10) for line in lines[4:])!r})"
    script = f"{CHILD}; import time; time.sleep(0.5); {late}.real; time.sleep(300)"
    side = run.run_side("slime", [sys.executable, "-c", script], made, 60)
    child = int((tmp_path / "slime/log").read_text().split()[0])
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE
    assert len(side["steps"]) == 2 and side["status"] == -15
    assert 0 < side["steps"][0]["end"] < side["steps"][1]["end"]
    (tmp_path / "results").mkdir()
    results_page.save("peers", run.result(made, {"slime": side}, 600), tmp_path / "results")
    assert results_page.load(tmp_path / "results")["peers"]["tables"][0]["rows"][-1][2] == "-"
