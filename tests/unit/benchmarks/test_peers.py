"""The benchmark beside verl: flags, logs, table, file of results.  It needs no verl here, and times nothing."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections import Counter
from pathlib import Path

import psutil
import pytest

from benchmarks import results_page
from benchmarks.peers import phases, run, workload
from slime.flags.parse import parse_args

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


def verl_line(step: int) -> dict:
    """What the logger ``file`` of verl 0.9.1 writes of a step."""
    spans = {"gen": 5.0, "old_log_prob": 1.0, "ref": 1.0, "adv": 0.0, "update_actor": 4.0, "update_weights": 0.25}
    data = {f"timing_s/{name}": value for name, value in (spans | {"step": 11.5}).items()}
    return {"step": step, "data": data | {"actor/pg_loss": 0.1, "perf/max_memory_allocated_gb": 40.0}}


def write_lines(path: Path, lines: list[dict], rest: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + rest)
    return path


def ended(steps: phases.Steps, *ends: float) -> phases.Steps:
    return [step | {"end": end} for step, end in zip(steps, ends, strict=True)]


def test_the_command_line_is_explained(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["run.py", "--help"])
    with pytest.raises(SystemExit) as end:
        run.main()
    assert end.value.code == 0 and capsys.readouterr().out.startswith("usage: run.py")


@pytest.mark.parametrize(("more", "said"), [("--warm-up=0", "at least 1"), ("--sides=verl", "verl is not installed")])
def test_what_cannot_run_is_refused(more, said, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(run.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        options(tmp_path, monkeypatch, more)
    assert said in capsys.readouterr().err


def test_the_flags_of_slime_are_accepted_and_both_sides_get_the_same_work(monkeypatch, tmp_path):
    made = options(tmp_path, monkeypatch)
    tokens = workload.write(tmp_path, made)
    made.shape = "qwen3-0.6B"  # its flags, on the small folder
    args = parse_args(argv=run.slime_words(made, tmp_path / "slime")[2:])
    assert args.colocate and (args.rollout_batch_size, args.global_batch_size, args.num_rollout) == (2, 8, 4)
    overrides = dict(word.lstrip("+").split("=", 1) for word in run.verl_words(made, tmp_path / "verl")[3:])
    assert overrides["data.train_files"] == args.prompt_data
    assert overrides["actor_rollout_ref.model.path"] == args.hf_checkpoint
    assert int(overrides["actor_rollout_ref.rollout.n"]) == args.n_samples_per_prompt
    assert float(overrides["actor_rollout_ref.actor.optim.lr"]) == args.lr
    assert int(overrides["actor_rollout_ref.rollout.max_num_seqs"]) == args.sglang_max_running_requests
    words = run.verl_words(made, tmp_path)
    assert "{" not in "".join(words) and max(Counter(word.split("=")[0] for word in words).values()) == 1
    rows = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    lengths = [[workload.forced_length(row["extra_info"], sample) for sample in range(4)] for row in rows]
    assert lengths == [[workload.response_length(i, sample, made) for sample in range(4)] for i in range(8)]
    assert tokens == sum(map(sum, lengths)) // 4 and all(16 <= length <= 32 for row in lengths for length in row)


def test_a_step_of_slime_has_ended_when_its_driver_says_so_and_its_sleep_is_found_a_step_later(tmp_path):
    lines = [line for step in range(3) for line in slime_lines(step)] + slime_lines(3)[:3]
    steps = phases.read_slime(write_lines(tmp_path / "metrics.jsonl", lines, rest='{"rollout/st'))
    assert [step["sleep"] for step in steps] == [1.0, 2.0, 3.0]
    assert steps[1]["actor_train"] == 2.0 and steps[2]["peak_gib"] == 32.0
    assert phases.read_slime(tmp_path / "none") == []


def test_steps_of_verl_are_read(tmp_path):
    steps = phases.read_verl(write_lines(tmp_path / "metrics.jsonl", [verl_line(1), verl_line(2)], rest="{"))
    assert [step["gen"] for step in steps] == [5.0, 5.0] and steps[0]["peak_gib"] == 40.0


def test_the_table_says_who_is_ahead_and_where_nothing_was_measured(tmp_path):
    lines = [line for step in range(3) for line in slime_lines(step)]
    slime = ended(phases.read_slime(write_lines(tmp_path / "a", lines)), 20.0, 30.0, 40.0)
    verl = ended(phases.read_verl(write_lines(tmp_path / "b", [verl_line(n) for n in (1, 2, 3)])), 50.0, 62.0, 74.0)
    made = phases.table(slime, verl, 1, 600)
    rows = {row[0]: row[1:] for row in made["rows"]}
    assert rows["generation, as the driver waits for it"] == [4.0, 5.0, 1.25, "slime"]
    assert rows["old log-probs"] == ["left out", 1.0, "", ""]
    assert rows["update"] == [2.0, 4.0, 2.0, "slime"]
    assert rows["trainer wakes and sleeps"] == [2.25, "stays awake", "", ""]
    assert rows["push, the engine's waking included"] == [0.5, 0.25, 0.5, "verl"]
    assert rows["rest"] == [0.75, 0.75, 1.0, "equal"]
    assert rows["**whole step**"] == [10.0, 12.0, 1.2, "slime"]
    assert rows["response tokens a second"] == [60, 50, 0.83, "slime"]
    assert rows["peak that torch allocated, GiB"] == [32.0, 40.0, 1.25, "slime"]
    failed = phases.table([], verl, 1, 600)
    assert [row[1] for row in failed["rows"][:-1]] == ["-"] * (len(failed["rows"]) - 1)
    assert failed["rows"][-1] == ["steps measured", 0, 2, "", ""]


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
