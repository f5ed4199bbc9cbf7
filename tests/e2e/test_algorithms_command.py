"""The command behind the end-to-end table: its rows' flags exist, jobs are looked after, numbers are read aright."""

from __future__ import annotations

import argparse
import json
import os
import stat
import subprocess
import time
from pathlib import Path

import pytest

from slime.compose import parse_flags
from tests.e2e import algorithm_jobs, algorithm_results, algorithms
from tests.e2e.algorithm_jobs import Recipe, Run
from tests.e2e.algorithm_results import RunResult
from tests.e2e.algorithm_variants import VARIANTS, Loop, Variant, select

RECORD = '{{"rollout/step": {step}, "perf/time_step_s": 1.5, "rollout/raw_reward": 0.5, "eval/step": {step}}}'


def variant(name: str = "one", **fields: object) -> Variant:
    return Variant(**{"name": name, "title": name, "flags": ("--lr", "1"), "why": "", **fields})


def result(name: str = "one", seed: int = 1, sampled: tuple = ((0, 0.3), (5, 0.96)), **fields: object) -> RunResult:
    about = {"title": name.upper(), "flags": ["--lr", "1"], "why": "so", "seconds": 9.0, "starts": 1, "failure": None}
    return RunResult(**{"variant": name, "seed": seed, "sampled": list(sampled), **about, **fields})


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    """A repository whose recipe is a stand-in: it notes what it got, and does what the file ``behaviour`` says."""
    script = tmp_path / "scripts" / "run-tiny-cpu.sh"
    script.parent.mkdir()
    script.write_text(
        '#!/usr/bin/env bash\nprintf "%s\\n" "$@" >"${SAVE_DIR}/words"\n'
        f'source "{tmp_path}/behaviour"\n'
        f"for step in 0 1 2; do echo '{RECORD.format(step='STEP')}' | sed \"s/STEP/${{step}}/g\"; done"
        ' >>"${SAVE_DIR}/metrics.jsonl"\nmkdir -p "${SAVE_DIR}/iter_1"; touch "${SAVE_DIR}/iter_1/weights"\n'
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    (tmp_path / "behaviour").write_text("true\n")
    (tmp_path / "warm" / "task" / "hf").mkdir(parents=True)
    (tmp_path / "warm" / "task" / "hf" / "config.json").write_text('{"head_dim": 64}')
    monkeypatch.setattr(algorithm_jobs, "REPO", tmp_path)
    monkeypatch.setattr(algorithms, "POLL_S", 0.05)
    return Recipe(
        device="cpu",
        out=tmp_path / "out",
        warm_start=tmp_path / "warm",
        warm_start_digest="abc",
        eval_config=tmp_path / "out" / "eval.yaml",
        rollouts=3,
        extra_flags=("--extra",),
        timeout_s=60,
        max_starts=1,
        keeps_checkpoints=False,
    )


def options(parallel: int = 1) -> argparse.Namespace:
    return algorithms.parse(["--parallel", str(parallel), "--stagger-s", "0"])


@pytest.mark.parametrize("loop", Loop)
def test_every_row_has_flags_that_exist(loop: Loop, tmp_path: Path) -> None:
    repo = Path(__file__).parents[2]
    record = tmp_path / "words"
    shell = f'ray() {{ printf "%s\\n" "$@" >"{record}"; }}; export -f ray; exec {repo}/scripts/run-tiny-cpu.sh'
    (tmp_path / "task/hf").mkdir(parents=True)
    (tmp_path / "task/hf/config.json").touch()  # what the script looks for
    variables = {"SLIME_SCRIPT_EXTERNAL_RAY": "1", "LOOP": loop.value, "TINY_DIR": str(tmp_path)}
    environment = dict(os.environ) | variables
    subprocess.run(["bash", "-c", shell], env=environment, check=True, timeout=250)
    words = record.read_text().splitlines()
    job = words[words.index("--") + 1 :]
    assert job[1] == ("train.py" if loop is Loop.SYNC else "train_async.py")
    for row in VARIANTS:
        if row.loop is loop:
            parse_flags([*job[2:], *(flag.replace("{run}", "/run") for flag in row.flags)])


def test_rows_are_chosen_by_name() -> None:
    assert [row.name for row in select("gspo, grpo")] == ["grpo", "gspo"]
    assert select(None) == list(VARIANTS)
    with pytest.raises(ValueError, match="--only names gpro; there is grpo"):
        select("gpro")


def test_a_finished_run_keeps_its_numbers_and_is_not_done_again(recipe: Recipe) -> None:
    run = Run(recipe, variant(), seed=2)
    algorithms.run_all([run], [], options())
    assert run.is_done
    assert run.result().step_s == 1.5
    assert sorted(path.name for path in run.folder.iterdir()) == ["log.txt", "metrics.jsonl", "run.json"]
    assert not Run(recipe, variant(), seed=2).may_start


def test_the_job_gets_the_head_dimension_of_the_warm_start_and_the_extra_flags_last(recipe: Recipe) -> None:
    (recipe.out.parent / "behaviour").write_text("exit 1\n")
    run = Run(recipe, variant(), seed=1)
    algorithms.run_all([run], [], options())
    words = (run.folder / "words").read_text().split()
    assert words[words.index("--kv-channels") + 1] == "64"
    assert words[-3:] == ["--lr", "1", "--extra"]


def test_a_job_that_fails_does_not_stop_the_others(recipe: Recipe) -> None:
    (recipe.out.parent / "behaviour").write_text('[[ "${SAVE_DIR}" != *bad* ]] || exit 7\n')
    runs = [Run(recipe, variant("bad"), 1), Run(recipe, variant("good"), 1)]
    algorithms.run_all(runs, [], options())
    assert runs[0].failure == "exit code 7 after 0 of 3 rollouts"
    assert runs[1].is_done
    assert [line.partition(":")[0] for line in algorithm_results.misses([r.result() for r in runs], 0.5)] == [
        *("bad, seed 1", "good, seed 1"),
    ]


def test_a_job_whose_time_is_up_is_stopped_with_its_children(recipe: Recipe) -> None:
    (recipe.out.parent / "behaviour").write_text('setsid sleep 300 & echo $! >"${SAVE_DIR}/child"; wait\n')
    run = Run(Recipe(**{**vars(recipe), "timeout_s": 3.0, "max_starts": 5}), variant(), seed=1)
    algorithms.run_all([run], [], options())
    assert run.failure == "not done after 3 s (--job-timeout-s)"
    child = Path("/proc", (run.folder / "child").read_text().strip(), "stat")
    deadline = time.monotonic() + 120
    while child.exists() and child.read_text().split()[2] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_folder_of_other_flags_is_refused(recipe: Recipe) -> None:
    algorithms.run_all([Run(recipe, variant(), 1)], [], options())
    with pytest.raises(ValueError, match="was made with other flags"):
        Run(recipe, variant(flags=("--lr", "2")), 1)


def test_jobs_take_the_gpus_that_are_used_least(recipe: Recipe) -> None:
    gpus = ["4", "5", "6"]
    one, two, pair = Run(recipe, variant(), 1), Run(recipe, variant(), 2), Run(recipe, variant(loop=Loop.FULLY), 1)
    one.gpus, two.gpus = ["4"], ["5"]
    assert algorithms.choose_gpus(pair, [one], gpus) == ["5", "6"]
    assert algorithms.may_run_beside(pair, [one], gpus, parallel=3)
    assert not algorithms.may_run_beside(pair, [one, two], gpus, parallel=3)  # one is free, it wants two
    assert algorithms.may_run_beside(pair, [one, two], gpus, parallel=6)  # more jobs than GPUs: they share
    assert not algorithms.may_run_beside(one, [two], [], parallel=1)


def test_the_evaluation_file_names_the_data_where_it_lies_now(tmp_path: Path) -> None:
    (tmp_path / "task").mkdir()
    (tmp_path / "task" / "eval.yaml").write_text("eval:\n    - name: held_out\n      path: /elsewhere/eval.jsonl\n")
    algorithms.write_eval_config(tmp_path, tmp_path / "new.yaml")
    assert f"      path: {tmp_path}/task/data/eval.jsonl" in (tmp_path / "new.yaml").read_text()


def test_a_row_shows_mean_and_range_and_who_never_arrived() -> None:
    runs = [result(seed=1), result(seed=2, sampled=((0, 0.3), (5, 0.80), (10, 0.92)))]
    text = algorithm_results.table({"rollouts": 10, "target": 0.95, "machine": "a machine"}, runs)
    row = next(line for line in text.splitlines() if line.startswith("| ONE | 1, 2"))
    assert "| 0.300, 0.940 (0.920 to 0.960) |" in row
    assert "| 7.5 (5 to 10) | 5, 1 never |" in row
    assert "* one, seed 2: 0.920 at best, the target is 0.950" in text


def test_numbers_survive_their_file(tmp_path: Path) -> None:
    runs = [result(log_prob_difference=[(0, 1e-7)], mismatch={"tis_abs": 0.1, "tis_clipfrac": 0.0})]
    about = {"rollouts": 5, "target": 0.95, "machine": "a machine"}
    algorithm_results.save(tmp_path / "results.json", about, runs)
    again_about, again = algorithm_results.load(tmp_path / "results.json")
    assert algorithm_results.table(again_about, again) == algorithm_results.table(about, runs)
    json.loads((tmp_path / "results.json").read_text())
    algorithm_results.draw(tmp_path / "curves.png", again_about, [*again, result(seed=2)])
    assert (tmp_path / "curves.png").stat().st_size > 10_000
