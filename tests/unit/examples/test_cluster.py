"""The files for clusters, as far as a machine without one can try them."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import yaml

from slime.compose import flag_groups
from slime.flags.parse import parse_flags

FOLDER = Path(__file__).parents[3] / "examples/cluster"


def test_slurm_writes_the_addresses_of_its_nodes_and_runs_the_recipe(tmp_path):
    (tmp_path / "my_run.sh").write_text('echo "$MASTER_ADDR $1"; cat "$HOSTFILE"')
    (tmp_path / "scontrol").write_text("#!/bin/sh\n[ $3 = nodes ] && echo localhost && echo localhost\n")
    (tmp_path / "scontrol").chmod(0o755)
    given = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "nodes",
        "USER": "me",
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
    }
    words = [FOLDER / "slurm.sh", "my_run.sh", "--lr"]
    done = subprocess.run(words, cwd=tmp_path, env=given, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["127.0.0.1", "--lr", "127.0.0.1", "127.0.0.1"]


def test_the_job_for_kuberay_takes_the_gpus_that_its_workers_have_and_has_known_flags():
    job = yaml.safe_load((FOLDER / "kuberay.yaml").read_text())
    python, program, *words = shlex.split(job["spec"]["entrypoint"])
    args = parse_flags(words, groups=flag_groups())
    (workers,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    (container,) = workers["template"]["spec"]["containers"]
    assert (python, program) == ("python3", "/opt/slime/train.py")
    assert args.actor_num_nodes == workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"]
    assert str(args.actor_num_gpus_per_node) == container["resources"]["limits"]["nvidia.com/gpu"]


def test_skypilot_starts_the_recipe_on_the_first_node_and_joins_it_from_the_second(tmp_path):
    task = yaml.safe_load((FOLDER / "skypilot.yaml").read_text())
    (tmp_path / "my_run.sh").write_text('echo "head $MASTER_ADDR:$RAY_PORT"')
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/ray").write_text('#!/bin/sh\necho "$@" "$RAY_AUTH_MODE"\n')
    (tmp_path / ".venv/bin/ray").chmod(0o755)
    given = {
        **os.environ,
        **task["envs"],
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
        "SKYPILOT_NUM_GPUS_PER_NODE": "8",
    }
    said = []
    for rank in ("0", "1"):
        words = ["bash", "-c", task["run"]]
        done = subprocess.run(
            words, cwd=tmp_path, env={**given, "SKYPILOT_NODE_RANK": rank}, capture_output=True, text=True, check=True
        )
        said.append(done.stdout)
    assert said[0] == "head 10.0.0.1:6479\n"
    assert said[1].startswith("start --address=10.0.0.1:6479 --node-ip-address 10.0.0.2 ")
    assert "--num-gpus 8 " in said[1] and said[1].endswith("--block token\n")
