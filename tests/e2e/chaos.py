"""Schedules of deaths, drawn from seeds, against the real job: tiny model, real processes, on a CPU.

    python -m tests.e2e.chaos --schedules 20 --seed 0 --work-dir runs/chaos

One or two parts of the job are killed, or stopped for good, each in a phase of a step.  Only the death of the driver
or the manager may end the command, which is then given again.  At the end no prompt is lost, none was trained twice,
no answer was generated again after a death, and no process is left.  One line for each schedule; exit code 1 when one
failed.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.job import GONE_S, JOB_S, Job, grpo_flags
from tests.e2e.kill_resume import account, generated_again, lines, tracker
from tests.e2e.recovery_times import make_task

NUM_ROLLOUT = 4
PARTS = {
    "engine": "sglang_utils.server_main",
    "engine actor": "ray::EngineActor",
    "router": "sglang_utils.router_main",
    "trainer rank": "ray::MegatronTrain",
    "manager": "ray::RolloutManager",
    "driver": "",
}
ENDING = ("manager", "driver")
"""Parts whose death may end the command: the manager's does while the driver asks it for more than samples."""
PHASES = ("generate", "train", "save", "push")
MAY_NOT_BE = ("lost", "trained twice", "trained and waiting", "ledger: problems", "generated again")


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


def draw(seed: int) -> list[Strike]:
    """Return the strikes of a seed, in the order of their moments."""
    rng = random.Random(seed)
    strikes = []
    for rollout_id in sorted(rng.sample(range(NUM_ROLLOUT - 1), rng.choice((1, 2)))):
        part = rng.choice(sorted(PARTS))
        # Nobody looks for a driver or a manager that stops.
        kind = signal.SIGKILL if part in ENDING or rng.random() < 0.7 else signal.SIGSTOP
        strikes.append(Strike(part, kind, rng.choice(PHASES), rollout_id, round(rng.uniform(0, 1), 1)))
    return strikes


def has_come(strike: Strike, job: Job, work_dir: Path) -> bool:
    """Return whether the phase of a strike has begun; it may be over."""
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


def strike_next(strikes: list[Strike], job: Job, work_dir: Path) -> Strike | None:
    """Carry out the next strike when it is time; return it then."""
    if not strikes or not has_come(strikes[0], job, work_dir):
        return None
    time.sleep(strikes[0].delay_s)
    victims = [job.process.pid] if strikes[0].part == "driver" else job.pids(PARTS[strikes[0].part])
    if strikes[0].part == "trainer rank":
        victims = victims[-1:]
    for pid in victims:
        os.kill(pid, strikes[0].signal)
    return strikes.pop(0) if victims else None


def run(seed: int, strikes: list[Strike], work_dir: Path, task: Path) -> list[str]:
    """Run the job of a schedule to its end; return what must not be."""
    flags = grpo_flags(
        task, work_dir / "save", *f"--actor-num-gpus-per-node {1 + seed % 2} --rollout-num-gpus 1".split(),
        *f"--num-rollout {NUM_ROLLOUT} --rollout-max-response-len 200 --max-tokens-per-gpu 2048".split(),
        *"--use-fault-tolerance --rollout-health-check-interval 5 --rollout-health-check-timeout 30".split(),
        *"--dynamic-sampling-filter-path tests.e2e.audit_plugins.filter_and_note".split(),
        *"--rollout-sample-hook-path tests.e2e.audit_plugins.note_answer".split(),
        *"--custom-megatron-before-train-step-hook-path tests.e2e.audit_plugins.note_train_step".split(),
        *("--save-debug-rollout-data", f"{work_dir}/dumps/{{rollout_id}}.pt"),
    )  # fmt: skip
    left, endings = list(strikes), list[float]()
    for life in range(len(strikes) + 1):
        job = Job("train.py", flags, work_dir / f"log{life}.txt", AUDIT_DIR=str(work_dir))
        try:
            deadline_s = time.monotonic() + JOB_S
            while job.process.poll() is None:
                if time.monotonic() > deadline_s:
                    return [f"the command did not end within {JOB_S} s"]
                done = strike_next(left, job, work_dir)
                if done is not None and done.part in ENDING:
                    endings.append(time.time())
                time.sleep(0.1)
            job.seconds_until_gone(GONE_S)
        finally:
            job.kill_everything()
        if job.process.returncode == 0:
            break
        if len(endings) <= life:
            return [f"the command ended: {job.text().strip()[-300:]!r}"]
    if left:
        return [f"did not happen: {left[0]}"]
    report = account(work_dir, NUM_ROLLOUT) | generated_again(work_dir, endings)
    return [f"{name}: {report[name]}" for name in MAY_NOT_BE if report[name]]


def main() -> int:
    """Run the schedules; return 1 when one of them failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work-dir", type=Path, default=Path("runs/chaos"))
    parser.add_argument("--schedules", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="The first seed.")
    options = parser.parse_args()
    root = options.work_dir.resolve()
    make_task(root)
    num_failed = 0
    for seed in range(options.seed, options.seed + options.schedules):
        folder, strikes, began_s = root / str(seed), draw(seed), time.monotonic()
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "save").mkdir(parents=True)
        problems = run(seed, strikes, folder, root)
        num_failed += bool(problems)
        told = "; ".join(map(str, strikes))
        verdict = f"FAILED: {'; '.join(problems)} (see {folder})" if problems else "ok"
        print(f"seed {seed}, {time.monotonic() - began_s:.0f} s: {told}: {verdict}", flush=True)
        if not problems:
            shutil.rmtree(folder)
    return int(num_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
