"""Every process that a start waits for is killed during the wait: the start ends at once, with the cause.

Each strike has its own job, whose start it interrupts.
"""

from __future__ import annotations

import os
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch

from tests.e2e.job import GONE_S, STEP_S, Job, grpo_flags

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.faults,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU path"),
]

RAYLET = "/raylet/raylet "
GCS = "/gcs_server "
MANAGER = "ray::RolloutManager"
ACTOR = "ray::EngineActor"
SERVER = "sglang_utils.server_main"
ROUTER = "sglang_utils.router_main"
RANK = "ray::MegatronTrainRayActor"
SCHEDULER = "sglang::scheduler"
DETOKENIZER = "sglang::detokenizer"
CONTROLLER = "sglang::data_parallel_controller"
DP_ATTENTION = "--rollout-num-gpus 2 --rollout-num-gpus-per-engine 2 --sglang-dp-size 2 --sglang-enable-dp-attention"


@dataclass(frozen=True)
class Strike:
    """A signal to the first process of a kind, once another process exists."""

    victim: str
    once: str
    message: str
    """Pattern of the driver's message."""
    layout: str = "--rollout-num-gpus 1"
    signal: signal.Signals = signal.SIGKILL

    def find(self, job: Job) -> list[int]:
        return named(job, self.victim) if named(job, self.once) else []


def named(job: Job, name: str) -> list[int]:
    """Processes of a job by name.  SGLang processes that set a title lose the environment that identifies the job."""
    if not name.startswith("sglang::"):
        return job.pids(name)
    found = []
    for server in job.pids(SERVER):
        try:
            children = psutil.Process(server).children(recursive=True)
            found += [child.pid for child in children if child.cmdline()[:1] and name in child.cmdline()[0]]
        except psutil.Error:  # it has just ended
            continue
    return found


# Its parent, SGLang's handlers or the family's watch may notice a process's death first.
SERVER_DIED = r"EngineDiedError: engine 0 .* (was killed by signal 9|ended with status 1)"
STRIKES = {
    "raylet, the manager starts": Strike(RAYLET, MANAGER, r"ProcessError: Ray's raylet .* ended with status -9"),
    "raylet, an engine starts": Strike(RAYLET, SERVER, r"ProcessError: Ray's raylet .* ended with status -9"),
    "gcs, the manager starts": Strike(GCS, MANAGER, r"ProcessError: Ray's gcs_server .* ended with status -9"),
    "manager, it starts": Strike(MANAGER, MANAGER, "EngineDiedError: the rollout manager died"),
    "manager, an engine starts": Strike(MANAGER, SERVER, "EngineDiedError: the rollout manager died"),
    "router, an engine starts": Strike(ROUTER, SERVER, r"EngineDiedError: router .*The router ended"),
    "engine's actor": Strike(ACTOR, SERVER, r"EngineDiedError: the actor of engine 0 .* died"),
    "engine's server": Strike(SERVER, SERVER, SERVER_DIED),
    "scheduler": Strike(SCHEDULER, SCHEDULER, SERVER_DIED),
    "detokenizer": Strike(DETOKENIZER, DETOKENIZER, SERVER_DIED),
    "scheduler with DP attention": Strike(SCHEDULER, SCHEDULER, SERVER_DIED, DP_ATTENTION),
    "controller with DP attention": Strike(CONTROLLER, CONTROLLER, SERVER_DIED, DP_ATTENTION),
    "rank, it starts": Strike(RANK, RANK, "EngineDiedError: actor rank 0 died"),
}


@pytest.mark.parametrize("strike", STRIKES.values(), ids=STRIKES.keys())
def test_a_process_that_dies_while_a_start_waits_for_it_ends_the_start(task: Path, tmp_path: Path, strike: Strike):
    flags = grpo_flags(task, tmp_path, *"--actor-num-gpus-per-node 1".split(), *strike.layout.split())
    job = Job("train.py", flags, tmp_path / "log.txt")
    job.wait_until(lambda: bool(strike.find(job)), f"{strike.victim} to strike", STEP_S)
    os.kill(strike.find(job)[0], strike.signal)
    struck_s = time.monotonic()
    assert job.finish(GONE_S) == 1, job.text()[-4000:]
    print(f"the command ended {time.monotonic() - struck_s:.1f} s after the strike")
    assert re.search("slime job failed: " + strike.message, job.text(), re.DOTALL), job.text()[-4000:]
    print(f"its last process went {job.seconds_until_gone(GONE_S):.1f} s later")
