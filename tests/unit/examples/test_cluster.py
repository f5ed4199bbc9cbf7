"""The cluster files, as far as they can be tested without a cluster."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from argparse import Namespace
from pathlib import Path

import yaml
from ray.autoscaler._private.kuberay import autoscaling_config

from slime.compose import flag_groups
from slime.flags.parse import parse_flags
from tests.unit.scripts.test_run_scripts import submitted

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


def recipe_of(words: list[str], folder: Path, variables: dict[str, str]) -> Namespace:
    """The flags with which a command's recipe, the same on the cluster and here, submits its job."""
    program, script, *more = words
    assert program == "bash"
    job, _ = submitted(script.removeprefix("/opt/slime/"), folder, *more, **variables)
    return parse_flags(job[2:], groups=flag_groups())


def test_the_job_for_kuberay_has_the_gpus_that_its_recipe_takes_and_joins_the_cluster(tmp_path):
    spec = yaml.safe_load((FOLDER / "kuberay.yaml").read_text())["spec"]
    variables = yaml.safe_load(spec["runtimeEnvYAML"])["env_vars"]
    assert variables["SLIME_SCRIPT_EXTERNAL_RAY"] == "1"
    args = recipe_of(shlex.split(spec["entrypoint"]), tmp_path, variables)
    # Ray's own reader of the cluster's description.
    cluster = {"metadata": {"name": "slime", "namespace": "default"}, "spec": spec["rayClusterSpec"]}
    nodes = autoscaling_config._derive_autoscaling_config_from_ray_cr(cluster)["available_node_types"]
    head, gpus = nodes["headgroup"], nodes["gpus"]
    assert (head["resources"]["GPU"], gpus["resources"]["GPU"]) == (0, args.actor_num_gpus_per_node)
    assert gpus["min_workers"] == gpus["max_workers"] == 2
    assert args.actor_num_nodes * args.actor_num_gpus_per_node + args.rollout_num_gpus == 2 * gpus["resources"]["GPU"]


def test_what_is_fetched_is_what_the_recipe_reads_and_is_converted_once(tmp_path):
    for name in ("hf", "slime"):
        (tmp_path / name).write_text(f'#!/bin/sh\necho "{name} $@" >>"{tmp_path}/calls"\n')
        (tmp_path / name).chmod(0o755)
    # A copy, whose .venv is not this one.
    script = tmp_path / "slime-copy/examples/cluster/fetch.sh"
    script.parent.mkdir(parents=True)
    shutil.copy(FOLDER / "fetch.sh", script)
    given = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "BASE_DIR": "/base"}

    def calls(**variables: str) -> list[list[str]]:
        (tmp_path / "calls").unlink(missing_ok=True)
        subprocess.run(["bash", script], env=given | variables, check=True, timeout=60)
        return [line.split() for line in (tmp_path / "calls").read_text().splitlines()]

    *downloads, convert = calls()
    folders = {words[words.index("--local-dir") + 1] for words in downloads}
    args = recipe_of(["bash", "scripts/run-glm4-9B.sh"], tmp_path, {"BASE_DIR": "/base"})
    data = {str(Path(path).parent) for path in (args.prompt_data, args.eval_prompt_data[-1])}
    assert folders == {args.hf_checkpoint} | data
    assert convert[1:] == shlex.split(
        f"convert hf_to_torch_dist --hf-checkpoint {args.hf_checkpoint} --save {args.ref_load}"
    )
    converted = tmp_path / "base" / Path(args.ref_load).name
    converted.mkdir(parents=True)
    (converted / "latest_checkpointed_iteration.txt").write_text("release")
    assert len(calls(BASE_DIR=str(tmp_path / "base"))) == len(downloads)


def test_skypilot_starts_the_recipe_on_the_first_node_and_joins_it_from_the_second(tmp_path):
    task = yaml.safe_load((FOLDER / "skypilot.yaml").read_text())
    assert (FOLDER.parents[1] / task["envs"]["RECIPE"]).is_file() and task["envs"]["BASE_DIR"] in task["file_mounts"]
    assert "examples/cluster/fetch.sh" in task["setup"]
    (tmp_path / "my_run.sh").write_text('echo "head $MASTER_ADDR:$RAY_PORT"')
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/ray").write_text('#!/bin/sh\necho "$@" "$RAY_AUTH_MODE"\n')
    (tmp_path / ".venv/bin/ray").chmod(0o755)
    given = {
        **os.environ,
        "RECIPE": "my_run.sh",
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
