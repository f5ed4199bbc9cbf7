"""Random schedules of process deaths against the real job: tiny model, real processes, on a CPU or on GPUs.

    python -m tests.e2e.chaos --schedules 20 --seed 0 --work-dir runs/chaos
    python -m tests.e2e.chaos --schedules 20 --device gpu --parallel 10 -- --sglang-attention-backend triton

A seed determines the job's layout, the trainer's recovery, and which one or two parts are killed, or stopped
for good, in which phases of which steps.  Only the death of the driver or the manager may end the command, which is
then run again.  At the end no prompt may be lost or trained twice, no answer generated again after a death,
and no process left.

Prints a line for each finished schedule, details of failed ones, and a table.  Exit code 1 if one failed.
``--parallel`` jobs run at a time, each in its own Ray; on GPUs they share the GPUs.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from types import FrameType

import torch

from benchmarks import results_page
from tests.e2e.job import GONE_S, JOBS, Job, grpo_flags, make_task
from tests.ext.ledger.kill_resume import account, generated_again, lines, tracker

NUM_ROLLOUT = 4
PARTS = {
    "engine": "sglang_utils.server_main",
    "engine actor": "ray::EngineActor",
    "router": "sglang_utils.router_main",
    "trainer rank": "TrainRayActor",  # of Megatron, or the process that copies its state
    "manager": "ray::RolloutManager",
    "driver": "",
}
ENDING = ("manager", "driver")
"""Parts whose death may end the command: the manager's only while the driver needs more than samples from it."""
PHASES = ("generate", "train", "save", "push")
MAY_NOT_BE = ("lost", "trained twice", "trained and waiting", "ledger: problems", "generated again")
GPUS_OF_A_JOB = 2
"""If there are more, parallel jobs use different ones."""
GPU_FLAGS = """--bf16 --attention-dropout 0 --hidden-dropout 0 --accumulate-allreduce-grads-in-fp32
    --attention-softmax-in-fp32 --sglang-mem-fraction-static 0.3 --sglang-max-total-tokens 65536
    --sglang-server-concurrency 64 --sglang-cuda-graph-max-bs-decode 8"""
"""The model is tiny; without limits its engine would use a third of the GPU, and spend minutes on CUDA graphs."""
START_APART_S = 2.0
"""Seconds between two starts: Ray clusters that look for free ports at the same moment find the same ones."""
_STARTING = Lock()
TOLD = re.compile(r"ERROR|WARNING|Error:|slime job failed|first cause|is back after|step \d+/")
"""Number of log lines that a story quotes."""


@dataclass(frozen=True)
class Strike:
    """A signal to one part, some seconds into a phase of the step after ``rollout_id``."""

    part: str
    signal: signal.Signals
    phase: str
    rollout_id: int
    delay_s: float

    def __str__(self) -> str:
        return f"{self.signal.name} to the {self.part} {self.delay_s:.1f} s into {self.phase} {self.rollout_id}"


@dataclass(frozen=True)
class Setting:
    """A seed's job layout, and its trainer's recovery."""

    num_ranks: int
    shares_gpus: bool
    recovery: str

    def __str__(self) -> str:
        ranks = f"{self.num_ranks} rank{'s' if self.num_ranks > 1 else ''}"
        return f"{ranks} {'on the GPUs of engines' if self.shares_gpus else 'beside an engine'}, {self.recovery}"

    def flags(self) -> list[str]:
        engines = "--colocate" if self.shares_gpus else "--rollout-num-gpus 1"
        return shlex.split(f"--actor-num-gpus-per-node {self.num_ranks} {engines} --trainer-recovery {self.recovery}")


def draw(seed: int) -> list[Strike]:
    """Return a seed's strikes, in chronological order."""
    rng = random.Random(seed)
    strikes = []
    for rollout_id in sorted(rng.sample(range(NUM_ROLLOUT - 1), rng.choice((1, 2)))):
        part = rng.choice(sorted(PARTS))
        # Nothing detects a stopped driver or manager.
        kind = signal.SIGKILL if part in ENDING or rng.random() < 0.7 else signal.SIGSTOP
        strikes.append(Strike(part, kind, rng.choice(PHASES), rollout_id, round(rng.uniform(0, 1), 1)))
    return strikes


def setting_of(seed: int, num_gpus: int, num_ranks: int | None = None) -> Setting:
    """Return a seed's layout on that many GPUs; 0 for a CPU's logical GPUs, of which there are enough.

    ``num_ranks``, if given, trainer ranks share their GPUs with engines.
    """
    if num_ranks:
        return Setting(num_ranks, True, ("checkpoint", "memory")[seed // 2 % 2])
    num_ranks = 1 + seed % 2 if num_gpus != 1 else 1
    shares_gpus = seed % 3 == 2 or 0 < num_gpus < num_ranks + 1
    return Setting(num_ranks, shares_gpus, ("checkpoint", "memory")[seed // 2 % 2])


def visible_gpus(seed: int, num_gpus: int, gpus_of_a_job: int = GPUS_OF_A_JOB) -> dict[str, str]:
    """Return the environment that gives a seed's job its GPUs."""
    if num_gpus <= gpus_of_a_job:
        return {}
    first = seed % (num_gpus // gpus_of_a_job) * gpus_of_a_job
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(first, first + gpus_of_a_job)))}


@dataclass
class Schedule:
    """A seed's plan and results."""

    seed: int
    setting: Setting
    strikes: list[Strike]
    folder: Path
    environment: dict[str, str]
    problems: list[str] = field(default_factory=list)
    story: list[str] = field(default_factory=list)
    back_s: dict[str, float] = field(default_factory=dict)
    """Seconds from a strike to the next optimizer step that begins."""
    took_s: float = 0.0
    began: float = 0.0

    def tell(self, what: str) -> None:
        self.story.append(f"{time.monotonic() - self.began:6.1f} s: {what}")


def has_come(strike: Strike, job: Job, work_dir: Path) -> bool:
    """Return whether the phase of a strike has begun; it may be over already."""
    number, save = strike.rollout_id, work_dir / "save"
    if tracker(save) >= number:
        return True
    match strike.phase:
        case "generate":
            return (f"step {number}/" if number else "Pushed weight version") in job.text()
        case "train":
            return any(step["rollout"] == number for step in lines(work_dir / "steps.jsonl"))
        case "save":
            return (save / f"iter_{number:07d}").exists()
    return False  # a push comes after the save


def parent_of(pid: int) -> int:
    """Return the parent of a process; 0 if the process is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def victims_of(part: str, job: Job) -> list[int]:
    """Return the newest process of such parts, and its forks."""
    if part == "driver":
        return [job.process.pid]
    pids = job.pids(PARTS[part])
    last = max((pid for pid in pids if parent_of(pid) not in pids), default=0)
    return [pid for pid in pids if last in (pid, parent_of(pid))]


def strike_now(strike: Strike, job: Job) -> bool:
    """Send the signal; return whether a process was there."""
    was_sent = False
    for pid in victims_of(strike.part, job):
        try:
            os.kill(pid, strike.signal)
            was_sent = True
        except ProcessLookupError:
            continue
    return was_sent


def flags_of(schedule: Schedule, task: Path, more: Sequence[str]) -> list[str]:
    folder = schedule.folder
    return grpo_flags(
        task, folder / "save", *schedule.setting.flags(),
        *f"--num-rollout {NUM_ROLLOUT} --rollout-max-response-len 200 --max-tokens-per-gpu 2048".split(),
        *"--use-fault-tolerance --rollout-health-check-interval 5 --rollout-health-check-timeout 30".split(),
        *"--weight-update-timeout-s 120 --engine-start-timeout-s 300".split(),  # half of it bounds a stopped engine
        *"--dynamic-sampling-filter-path tests.e2e.audit_plugins.filter_and_note".split(),
        *"--rollout-sample-hook-path tests.e2e.audit_plugins.note_answer".split(),
        *"--custom-megatron-before-train-step-hook-path tests.e2e.audit_plugins.note_train_step".split(),
        *("--save-debug-rollout-data", f"{folder}/dumps/{{rollout_id}}.pt"), *more,
    )  # fmt: skip


def live(schedule: Schedule, job: Job, left: list[Strike], moments: list[float], deadline_s: float) -> Strike | None:
    """Follow one job to its end and strike it on the way; return the last strike carried out.

    Args:
        left: strikes to come; those carried out are removed.
        moments: times of strikes carried out; new ones are appended.

    Raises:
        TimeoutError: the deadline passed.
    """
    last: Strike | None = None
    struck_s, num_steps = 0.0, 0
    while job.process.poll() is None:
        now_s = time.monotonic()
        if now_s > deadline_s:
            raise TimeoutError("the schedule is out of time")
        if last is not None and struck_s and len(lines(schedule.folder / "steps.jsonl")) > num_steps:
            schedule.back_s[str(last)] = now_s - struck_s
            schedule.tell(f"the next optimizer step, {now_s - struck_s:.1f} s after {last}")
            struck_s = 0.0
        if left and has_come(left[0], job, schedule.folder):
            time.sleep(left[0].delay_s)
            num_steps = len(lines(schedule.folder / "steps.jsonl"))
            if strike_now(left[0], job):
                last, struck_s = left.pop(0), time.monotonic()
                moments.append(time.time())
                schedule.tell(str(last))
        time.sleep(0.1)
    return last


def run(schedule: Schedule, task: Path, more: Sequence[str], limit_s: float) -> None:
    """Run the job of a schedule to its end; add everything that must not happen to its problems."""
    left, moments = list(schedule.strikes), list[float]()
    deadline_s = time.monotonic() + limit_s
    for life in range(len(schedule.strikes) + 1):
        log = schedule.folder / f"log{life}.txt"
        variables = schedule.environment | {"AUDIT_DIR": str(schedule.folder)}
        with _STARTING:
            job = Job("train.py", flags_of(schedule, task, more), log, **variables)
            time.sleep(START_APART_S)
        schedule.tell(f"start {life + 1} of the command")
        try:
            last = live(schedule, job, left, moments, deadline_s)
            schedule.tell(f"the command ended with code {job.process.returncode}")
            job.seconds_until_gone(min(GONE_S, max(1.0, deadline_s - time.monotonic())))
        finally:
            job.kill_everything()
        if job.process.returncode == 0:
            break
        if last is None or last.part not in ENDING:
            schedule.problems.append(f"the command ended: {job.text().strip()[-300:]!r}")
            return
    else:
        schedule.problems.append("the command failed each time that it was given")
        return
    if left:
        schedule.problems.append(f"did not happen: {left[0]}")
        return
    report = account(schedule.folder, NUM_ROLLOUT) | generated_again(schedule.folder, moments)
    schedule.problems += [f"{name}: {report[name]}" for name in MAY_NOT_BE if report[name]]


def try_out(schedule: Schedule, task: Path, more: Sequence[str], limit_s: float) -> Schedule:
    """Run a whole schedule, catching failures; write its story beside its logs."""
    shutil.rmtree(schedule.folder, ignore_errors=True)
    (schedule.folder / "save").mkdir(parents=True)
    schedule.began = time.monotonic()
    try:
        run(schedule, task, more, limit_s)
    except (AssertionError, OSError, ValueError, KeyError, subprocess.TimeoutExpired) as error:
        # Remaining processes, an exceeded deadline, missing files: these do not affect the next schedule.
        schedule.problems.append(f"{type(error).__name__}: {error}")
    schedule.took_s = time.monotonic() - schedule.began
    (schedule.folder / "story.txt").write_text("\n".join([*schedule.story, *schedule.problems]) + "\n")
    return schedule


def told(schedule: Schedule) -> str:
    """Return a schedule's line; if it failed, also its story and the end of its logs."""
    strikes = "; ".join(map(str, schedule.strikes))
    head = f"seed {schedule.seed}, {schedule.took_s:.0f} s, {schedule.setting}: {strikes}: "
    if not schedule.problems:
        return head + "ok"
    text = [head + "FAILED", *(f"  {problem}" for problem in schedule.problems), *schedule.story]
    for log in sorted(schedule.folder.glob("log*.txt")):
        found = [line[:300] for line in log.read_text(errors="replace").splitlines() if TOLD.search(line)]
        text += [f"  {log}:", *(f"    {line}" for line in found[-12:])]
    return "\n".join(text)


def table(schedules: Sequence[Schedule]) -> str:
    columns = "| seed | job | strikes | s to the next optimizer step | s | result |"
    rows = ["## Schedules of deaths", "", columns, "|" + "---|" * 6]
    for schedule in sorted(schedules, key=lambda each: each.seed):
        strikes = "; ".join(map(str, schedule.strikes))
        back = ", ".join(f"{seconds:.1f}" for seconds in schedule.back_s.values()) or "-"
        result = "failed: " + "; ".join(schedule.problems)[:80].replace("|", "/") if schedule.problems else "ok"
        rows.append(
            f"| {schedule.seed} | {schedule.setting} | {strikes} | {back} | {schedule.took_s:.0f} | {result} |"
        )
    return "\n".join(rows)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work-dir", type=Path, default=Path("runs/chaos"))
    parser.add_argument("--schedules", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="The first seed.")
    parser.add_argument("--parallel", type=int, default=1, help="Schedules that run side by side.")
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--ranks", type=int, help="Trainer ranks of every job; default: 1 or 2, by the seed.")
    parser.add_argument("--limit-s", type=float, default=1800, help="Seconds that one schedule may take.")
    parser.add_argument("--write-docs", action="store_true", help="Record the table in benchmarks/results.")
    parser.add_argument("flags", nargs="*", help="More flags for train.py, after --.")
    options = parser.parse_args()
    if options.write_docs and not (results_page.FOLDER / f"chaos_{options.device}.json").exists():
        parser.error(f"--write-docs: there is no benchmarks/results/chaos_{options.device}.json to write into")
    if options.device == "gpu" and not torch.cuda.is_available():
        parser.error("--device gpu: torch sees no GPU here")
    if options.device == "cpu" and torch.cuda.is_available():
        parser.error("--device cpu: this machine has GPUs, and a job takes them; use --device gpu, or hide them")
    return options


def stop(signum: int, frame: FrameType | None) -> None:
    """End every job, and then this process with the threads that wait for them."""
    for job in JOBS:
        job.kill_everything()
    os._exit(128 + signum)


def main() -> int:
    """Run the schedules; return 1 if one of them failed."""
    options = parse()
    num_gpus = torch.cuda.device_count() if options.device == "gpu" else 0
    more = [*(shlex.split(GPU_FLAGS) if num_gpus else []), *options.flags]
    root = options.work_dir.resolve()
    make_task(root)
    seeds = range(options.seed, options.seed + options.schedules)
    gpus_of_a_job = options.ranks or GPUS_OF_A_JOB
    schedules = [
        Schedule(
            seed, setting_of(seed, min(num_gpus, gpus_of_a_job), options.ranks), draw(seed), root / str(seed),
            visible_gpus(seed, num_gpus, gpus_of_a_job),
        )
        for seed in seeds
    ]  # fmt: skip
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    with ThreadPoolExecutor(options.parallel) as pool:
        for future in as_completed(pool.submit(try_out, each, root, more, options.limit_s) for each in schedules):
            schedule = future.result()
            print(told(schedule), flush=True)
            if not schedule.problems:
                shutil.rmtree(schedule.folder)
    num_failed = sum(bool(schedule.problems) for schedule in schedules)
    shown = table(schedules)
    print(f"\n{shown}\n\n{len(schedules) - num_failed} of {len(schedules)} schedules ended well.")
    if options.write_docs:
        results_page.record(f"chaos_{options.device}", shown)
    return int(num_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
