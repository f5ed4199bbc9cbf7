"""Prepares a seed's folder and runs its recipe's script, each command with a deadline and a log."""

from __future__ import annotations

import os
import random
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock

import torch

from slime.utils import env
from slime.utils.net import get_free_port
from tests.matrix.flags import model_flags
from tests.seeds import inputs
from tests.seeds.recipes import ALL, Form, Job, Seed

REPO = Path(__file__).resolve().parents[2]
PREPARE_S = 300
"""Deadline of one conversion, in seconds."""
STOP_S = 60
"""Seconds for a command to stop; then it is killed."""
START_APART_S = 5.0
"""Seconds between two starts: Ray clusters that look for free ports at the same moment find the same ones."""
IN_A_RAY = 'source scripts/lib.sh; start_ray "$1"; shift; bash "$@"'
"""A cluster with as many GPUs as the job uses, because multi-node scripts would use fixed ports."""
ENGINES = """\
sglang:
  - name: default
    server_groups:
      - worker_type: prefill
        num_gpus: {size}
        num_gpus_per_engine: {size}
        overrides: {{disaggregation_ib_device: null}}
      - worker_type: decode
        num_gpus: {size}
        num_gpus_per_engine: {size}
        overrides: {{disaggregation_ib_device: null}}
"""
ONE_ENGINE = """\
sglang:
  - name: default
    server_groups: [{worker_type: regular, num_gpus: 1, num_gpus_per_engine: 1}]
"""
"""For a machine with one GPU."""
RUNNING: set[subprocess.Popen[bytes]] = set()
_STARTING = Lock()


class CommandFailed(Exception):
    """A command failed or timed out; the message names its log."""


def prepare(seed: Seed, form: Form, base: Path, dtype: torch.dtype, num_gpus: int) -> None:
    """Write the model and the questions, and convert; replaces the results of an earlier call."""
    inputs.clear(base)
    base.mkdir(parents=True)
    if seed.has_pictures:
        inputs.write_pictures(base, seed.folder, seed.family)
    else:
        inputs.write_questions(base)
        inputs.write_model(base / seed.folder, seed.family, dict(form.sizes), weight_std=form.weight_std, dtype=dtype)
    (base / "engines.yaml").write_text(ENGINES.format(size=1) if num_gpus > 1 else ONE_ENGINE)
    (base / "wide_engines.yaml").write_text(ENGINES.format(size=2) if num_gpus > 3 else ONE_ENGINE)
    for number, command in enumerate(form.prepare):
        words = command.format(
            base=base, model=_model_flags(seed, base), port=get_free_port(random.randrange(20000, 30000))
        )
        run(["bash", "-e", "-c", words], base / f"prepare-{number}.log", limit_s=PREPARE_S)


def run_job(seed: Seed, form: Form, job: Job, base: Path, save: Path, num_rollout: int, limit_s: float) -> Path:
    """Run the script with the job's flags; return its log.

    Args:
        save: the job's checkpoint folder.
        num_rollout: the value of the flag, which includes rollouts of earlier jobs.
    """
    log = base / f"{save.name}-{num_rollout}.log"
    text = " ".join((ALL, form.flags, job.flags)).format(base=base, save=save, model=_model_flags(seed, base))
    compare = ["--check-weight-update-equal" if form.compares else "--verbose"]
    flags = [*shlex.split(text), *compare, "--num-rollout", str(num_rollout)]
    variables = {
        **{"BASE_DIR": str(base), "ACTOR_NUM_NODES": "1", "MASTER_ADDR": "127.0.0.1", "SOCKET_IFNAME": "lo"},
        "DEVICE": "gpu" if torch.cuda.is_available() else "cpu",
        **form.environment,
        "JOB_EXTRA_ENV": " ".join(form.environment),
    }
    words = ["bash", "-c", IN_A_RAY, "seeds", str(job.num_gpus), f"scripts/{seed.script}", *flags]
    run(words, log, limit_s=limit_s, variables=variables)
    return log


def _model_flags(seed: Seed, base: Path) -> str:
    return shlex.join(model_flags(base / seed.folder))


def run(words: Sequence[str], log: Path, *, limit_s: float, variables: Mapping[str, str] | None = None) -> None:
    """Run a command in the repository, with this interpreter first on PATH.

    Raises:
        CommandFailed: its exit code is not 0, or it timed out.
    """
    environment = {
        # A trainer in this process may have left the variables that select Megatron-core's attention.
        **{name: value for name, value in env.copy().items() if not name.startswith("NVTE_")},
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), env.get_str("PATH") or ""]),
        "OMP_NUM_THREADS": "1",
        **(variables or {}),
    }
    with open(log, "wb") as file:
        with _STARTING:
            process = subprocess.Popen(
                words, cwd=REPO, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )
            RUNNING.add(process)
            time.sleep(0 if variables is None else START_APART_S)
        try:
            code = process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired as error:
            raise CommandFailed(f"no end within {limit_s:.0f} s; see {log}") from error
        finally:
            stop(process)
            RUNNING.discard(process)
    if code != 0:
        raise CommandFailed(f"exit code {code}; see {log}")


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a command and its children: on a signal the scripts stop their Ray."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        os.killpg(process.pid, number)
        try:
            process.wait(timeout=STOP_S)
        except subprocess.TimeoutExpired:
            continue
