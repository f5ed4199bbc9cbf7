"""Starts ``train.py`` as a user would, follows it, kills it, and checks what is left."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

REPO = Path(__file__).resolve().parents[2]
PYTHONPATH = os.pathsep.join([str(REPO), *filter(None, [os.environ.get("PYTHONPATH")])])
"""PYTHONPATH of what the tests start: this repository before the environment's entries."""

# Deadlines in seconds, for a machine with a load of ten; two idle cores need less than a tenth.
STEP_S = 480
"""Until a job prints its first step."""
JOB_S = 900
"""Until a job ends by itself."""
TASK_S = 400
"""For one of the two programs that create the task."""
GONE_S = 180
"""Until a killed job has ended, with all its processes."""

RAY = {"RAY_ADDRESS": "local", "RAY_gcs_server_port_wait_time_s": "120"}
"""A private cluster, whose first server may need more than Ray's 20 s to start on such a machine."""

JOBS: list[Job] = []
"""Every started job; a fixture kills the remains of each after each test."""


class Job:
    """One training job in a private Ray; its processes are found by a tag in their environment.

    Args:
        script: a Python driver or a shell recipe, by its path in the repository.
    """

    def __init__(self, script: str, flags: list[str], log: Path, **environment: str) -> None:
        self._tag = f"SLIME_TEST_JOB={uuid.uuid4().hex}"
        JOBS.append(self)
        name, value = self._tag.split("=")
        self.log = log
        self.process = subprocess.Popen(
            [*([sys.executable] if script.endswith(".py") else []), REPO / script, *flags],
            stdout=open(log, "w"),
            stderr=subprocess.STDOUT,
            cwd=REPO,
            env=dict(os.environ) | {name: value, "PYTHONPATH": PYTHONPATH} | RAY | environment,
            start_new_session=True,
            # Processes that a shell starts in the background ignore Ctrl-C; a test's job must not.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def pids(self, pattern: str = "") -> list[int]:
        """Live processes of the job whose command line contains ``pattern``."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                is_ours = self._tag.encode() in (folder / "environ").read_bytes().split(b"\0")
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if is_ours and pattern in command:
                found.append(int(folder.name))
        return found

    def listening(self) -> set[tuple[str, int, str]]:
        """Every listening TCP socket of the job: address, port, name of its process."""
        found = set()
        for pid in self.pids():
            try:
                process = psutil.Process(pid)
                name = " ".join(process.cmdline())
                sockets = process.net_connections("tcp")
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
            found |= {(each.laddr.ip, each.laddr.port, name) for each in sockets if each.status == psutil.CONN_LISTEN}
        return found

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_until(self, condition: Callable[[], bool], what: str, timeout_s: float, *, poll_s: float = 0.05) -> None:
        """Wait for ``condition()``; fail if the job ends first, or on timeout."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, f"the job ended before {what}:\n{self.text()[-4000:]}"
            assert time.monotonic() < deadline, f"no {what} within {timeout_s} s:\n{self.text()[-4000:]}"
            time.sleep(poll_s)

    def finish(self, timeout_s: float) -> int:
        return self.process.wait(timeout=timeout_s)

    def seconds_until_gone(self, timeout_s: float) -> float:
        """Wait until no process of the job is left; return the seconds."""
        start = time.monotonic()
        while self.pids():
            assert time.monotonic() - start < timeout_s, f"still alive: {self.commands()}"
            time.sleep(0.2)
        return time.monotonic() - start

    def strike(self, process: str, message: str) -> None:
        """SIGKILL a part of the job: it must end with ``message``, a pattern of the cause, and leave nothing."""
        victims = self.pids(process)
        assert victims, f"no {process} runs: {self.commands()}"
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        assert self.finish(GONE_S) == 1
        assert re.search("slime job failed: " + message, self.text(), re.DOTALL), self.text()[-3000:]
        self.seconds_until_gone(GONE_S)

    def commands(self) -> list[str]:
        lines = []
        for pid in self.pids():
            try:
                lines.append(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()[:120])
            except OSError:
                continue
        return lines

    def kill_everything(self) -> int:
        """SIGKILL every process; return how many were killed."""
        killed = 0
        for _ in range(50):
            pids = self.pids()
            if not pids:
                break
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                    killed += 1
                except ProcessLookupError:
                    continue
            time.sleep(0.1)
        self.process.wait(timeout=30)
        return killed


def make_task(folder: Path) -> None:
    """Write the tiny task with its random model, and the converted checkpoint; keeps results of earlier calls."""
    if (folder / "torch_dist/latest_checkpointed_iteration.txt").exists():
        return
    for words in (
        ["examples/tiny_arithmetic/make_task.py", "--output", f"{folder}/task"],
        [
            "tools/convert_hf_to_torch_dist.py",
            "--hf-checkpoint",
            f"{folder}/task/hf",
            "--save",
            f"{folder}/torch_dist",
        ],
    ):
        environment = dict(os.environ) | {"PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, *words], cwd=REPO, check=True, timeout=TASK_S, env=environment)


def records(folder: Path, key: str) -> list[dict[str, Any]]:
    """The metric records of a run that have ``key``, in order."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if key in row]


def grpo_flags(task: Path, save: Path, *more: str) -> list[str]:
    """A small GRPO run with the features of a large one; config.json describes the model."""
    text = f"""
        --actor-num-nodes 1 --hf-checkpoint {task}/task/hf --ref-load {task}/torch_dist --load {save} --save {save}
        --save-interval 1 --prompt-data {task}/task/data/grpo.jsonl --input-key prompt --label-key label
        --apply-chat-template --rollout-shuffle --rm-type random --num-rollout 2 --rollout-batch-size 4
        --n-samples-per-prompt 4 --rollout-max-response-len 24 --global-batch-size 8 --use-dynamic-batch-size
        --max-tokens-per-gpu 512 --advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.01
        --kl-loss-type low_var_kl --eps-clip 0.2 --eps-clip-high 0.28 --optimizer adam --lr 1e-4
        --lr-decay-style constant --weight-decay 0.1 --over-sampling-batch-size 6 --partial-rollout
        --dynamic-sampling-filter-path slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std
        --rollout-num-gpus-per-engine 1 --save-debug-rollout-data {save}/dump/{{rollout_id}}.pt
    """
    return [*shlex.split(text), *more]


def replay_flags(task: Path, save: Path, dumps: str, *more: str) -> list[str]:
    """The same run without engines, on recorded rollouts, which it does not overwrite."""
    flags = grpo_flags(task, save, *more)
    cut = flags.index("--save-debug-rollout-data")
    return [*flags[:cut], *flags[cut + 2 :], "--load-debug-rollout-data", dumps]
