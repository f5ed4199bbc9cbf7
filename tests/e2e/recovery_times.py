"""Measures how long a job with two trainer ranks and an engine takes from a failure to its next trained step.

    python -m tests.e2e.recovery_times --work-dir runs/recovery kill stop poison change sigterm_driver

One job for each case on two CPU cores, with the tiny task; prints the seconds and the driver's messages.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import time
from pathlib import Path

from tests.e2e.job import Job, grpo_flags, make_task, records
from tests.nodes.cluster import logical_nodes

HOOKS = ("kill", "stop", "poison", "change")
"""Hooks of ``dying_trainer``."""
FAILURES = (*HOOKS, "manager", "driver")
"""SIGKILL to the rollout manager while it generates, and to the driver under its supervisor."""
NODES = ("node", "node_returns")
"""Several Ray nodes on this machine, of which one dies."""
PREEMPTIONS = ("sigterm_driver", "sigterm_rank")
ON_NAN = {"poison": "rollback 1", "change": "rollback 1"}


def measure(work_dir: Path, case: str, recovery: str) -> None:
    """Run one case to its end and print its times."""
    save = work_dir / f"{case}_{recovery}"
    save.mkdir(parents=True)
    hook = f"--custom-megatron-before-train-step-hook-path tests.e2e.dying_trainer.{case}"
    flags = grpo_flags(
        work_dir, save, *"--actor-num-gpus-per-node 2 --rollout-num-gpus 1 --num-rollout 4".split(),
        *f"--save-interval {2 if recovery == 'checkpoint' else 100} --trainer-recovery {recovery}".split(),
        *(hook.split() if case in HOOKS else ["--supervise"]),
        *f"--on-nan {ON_NAN.get(case, 'stop')}".split(),
    )  # fmt: skip
    job = Job("train.py", flags, save / "log.txt")
    mark = save / "died_in_1"
    try:
        if case not in HOOKS:
            job.wait_until(lambda: "step 3/4" in job.text(), "the third step", 500)
            drivers = [pid for pid in job.pids("train.py") if pid != job.process.pid]
            os.kill((job.pids("ray::RolloutManager") if case == "manager" else drivers)[0], signal.SIGKILL)
            mark.touch()
        job.wait_until(mark.exists, "the failure", 500)
        struck, before = mark.stat().st_mtime, len(records(save, "train/step"))
        job.wait_until(lambda: len(records(save, "train/step")) > before, "the next trained step", 500)
        took_s = time.time() - struck
        code = job.finish(500)
    finally:
        job.kill_everything()
    said = re.findall(r"^.*(?:[Rr]estarting|is back after).*$", job.text(), flags=re.MULTILINE)
    steps = [row["train/step"] for row in records(save, "train/step")]
    print(
        f"{case}, {recovery}: {took_s:.1f} s to the next trained step, exit code {code}, steps {steps}",
        *said,
        sep="\n  ",
    )


def lose_node(work_dir: Path, case: str, recovery: str) -> None:
    """The node of one of two ranks dies in the third rollout; the rank continues on the spare node, or a new one.

    No engine is on that node: nothing would restart it, and the run would end.
    """
    save = work_dir / f"{case}_{recovery}"
    save.mkdir(parents=True)
    has_spare = case == "node"
    flags = grpo_flags(
        work_dir, save, *"--actor-num-nodes 2 --actor-num-gpus-per-node 1 --num-gpus-per-node 1".split(),
        *f"--rollout-num-gpus 1 --num-rollout 4 --spare-nodes {int(has_spare)}".split(),
        *f"--save-interval {2 if recovery == 'checkpoint' else 100} --trainer-recovery {recovery}".split(),
    )  # fmt: skip
    with logical_nodes(4 + has_spare, 1, {"GLOO_SOCKET_IFNAME": "lo"}, head_gpus=0) as nodes:
        job = Job("train.py", flags, save / "log.txt", RAY_ADDRESS=nodes.address)
        try:
            job.wait_until(lambda: "step 2/4" in job.text(), "the second step", 900)
            struck, before = time.time(), len(records(save, "train/step"))
            nodes.remove("127.0.0.3")
            if not has_spare:
                job.wait_until(lambda: "GPUs are gone" in job.text(), "the wait for the node", 300)
                nodes.add()
            job.wait_until(lambda: "The trainer is back" in job.text(), "the trainer", 500)
            job.wait_until(lambda: len(records(save, "train/step")) > before, "the next trained step", 500)
            took_s = time.time() - struck
            code = job.finish(500)
        finally:
            job.kill_everything()
    steps = [row["train/step"] for row in records(save, "train/step")]
    print(
        f"{case}, {recovery}: {took_s:.1f} s to the next trained step, exit code {code}, steps {steps}",
        *re.findall(r"^.*(?:moves to|is back after).*$", job.text(), flags=re.MULTILINE),
        sep="\n  ",
    )


def preempt(work_dir: Path, case: str) -> None:
    """SIGTERM the driver or a rank in the third rollout, before the only checkpoint; then start again."""
    save = work_dir / case
    save.mkdir(parents=True)
    flags = grpo_flags(
        work_dir, save, *"--actor-num-gpus-per-node 2 --rollout-num-gpus 1 --num-rollout 4".split(),
        *"--save-interval 100 --preemption-grace-s 60".split(),
    )  # fmt: skip
    job = Job("train.py", flags, save / "log.txt")
    try:
        job.wait_until(lambda: "step 2/4" in job.text(), "the second step", 500)
        began = time.time()
        victim = job.process.pid if case == "sigterm_driver" else job.pids("TrainRayActor")[1]
        os.kill(victim, signal.SIGTERM)
        code = job.finish(100)
        left_s = time.time() - began
        gone_s = job.seconds_until_gone(60)
    finally:
        job.kill_everything()
    saved = (save / "latest_checkpointed_iteration.txt").read_text()
    job = Job("train.py", flags, save / "log2.txt")
    try:
        again = job.finish(500)
    finally:
        job.kill_everything()
    steps = [row["train/step"] for row in records(save, "train/step")]
    print(f"{case}: left after {left_s:.1f} s (+{gone_s:.1f} s) with {code}, saved {saved}; then {again}, {steps}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work-dir", type=Path, required=True)
    parser.add_argument("--trainer-recovery", choices=["checkpoint", "memory"], default="checkpoint")
    parser.add_argument("cases", nargs="+", choices=[*FAILURES, *NODES, *PREEMPTIONS])
    options = parser.parse_args()
    make_task(options.work_dir)
    for case in options.cases:
        if case in FAILURES:
            measure(options.work_dir.resolve(), case, options.trainer_recovery)
        elif case in NODES:
            lose_node(options.work_dir.resolve(), case, options.trainer_recovery)
        else:
            preempt(options.work_dir.resolve(), case)


if __name__ == "__main__":
    main()
