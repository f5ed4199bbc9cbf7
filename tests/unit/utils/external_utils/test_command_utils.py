"""Commands built by users' scripts: what would run, without running it."""

from __future__ import annotations

import inspect
import shlex
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from slime.utils.errors import ConfigError
from slime.utils.external_utils import command_utils as U


@pytest.fixture
def commands(monkeypatch) -> list[str]:
    """Commands in the order in which they would run."""
    ran: list[str] = []
    monkeypatch.setattr(U, "exec_command", lambda cmd, capture_output=False: ran.append(cmd))
    monkeypatch.setattr(U, "check_has_nvlink", lambda: False)
    for name in ("SLIME_SCRIPT_NUM_NODES", "SLURM_JOB_NUM_NODES", "SLURM_NODEID", "MASTER_ADDR", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    return ran


def run_with_stubs(command: str) -> list[str]:
    """Run a training command with stubs of the cluster and the job that print their arguments."""
    stubs = """
        start_ray() { echo "start_ray $*"; }
        start_nodes() { echo "start_nodes $*"; }
        submit_job() { echo "$JOB_ENV"; printf '%s\\n' "$@"; }
    """
    source, rest = command.split(" && ", 1)
    done = subprocess.run(
        ["bash", "-c", f"{source}\n{stubs}\n{rest}"], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.splitlines()


def test_a_job_gets_the_models_flags_then_the_scripts_and_its_variables(commands):
    U.execute_train(
        "--lr 1e-6 \n --prompt-data 'a b.jsonl' ",
        num_gpus_per_node=8,
        megatron_model_type="qwen3-4B",
        extra_env_vars={"A": "it's 1", "B": "2"},
        config=U.ExecuteTrainConfig(extra_env_vars="B=3 C='x y'"),
    )
    start, job_env, script, *flags = run_with_stubs(commands[0])
    assert start == "start_ray 8"
    assert '"A": "it\'s 1"' in job_env and '"B": "3"' in job_env and '"C": "x y"' in job_env
    assert script == "train.py"
    assert flags[-4:] == ["--lr", "1e-6", "--prompt-data", "a b.jsonl"]
    assert flags[flags.index("--num-layers") + 1] == "36"


def test_several_nodes_another_script_and_no_model(commands):
    order: list[str] = []
    U.execute_train(
        "--x",
        4,
        None,
        train_script="train_async.py",
        before_ray_job_submit=lambda: order.append("before" if not commands else "late"),
        config=U.ExecuteTrainConfig(num_nodes=2, cuda_core_dump=True),
    )
    assert order == ["before"] and "source scripts/nodes.sh && start_nodes 2 4" in commands[0]
    assert "CUDA_ENABLE_COREDUMP_ON_EXCEPTION=1" in commands[0] and "MODEL_ARGS" not in commands[0]
    assert commands[0].endswith("submit_job train_async.py --x")


def test_an_unknown_model_is_named_with_the_known_ones(commands):
    with pytest.raises(ConfigError, match="qwen4.*qwen3-4B"):
        U.execute_train("", 8, "qwen4")
    with pytest.raises(ConfigError, match="'A'.*NAME=value"):
        U.execute_train("", 8, None, config=U.ExecuteTrainConfig(extra_env_vars="A"))


def test_a_checkpoint_is_converted_once(commands, tmp_path, monkeypatch):
    U.convert_checkpoint("Qwen3-4B", "qwen3-4B", 8, extra_args="--x 1", dir_dst=str(tmp_path))
    words = shlex.split(commands[0])
    assert words[words.index("torchrun") :][:4] == [
        "torchrun",
        "--nproc-per-node",
        "8",
        "tools/convert_hf_to_torch_dist.py",
    ]
    assert words[-6:] == [
        "--hf-checkpoint",
        "/root/models/Qwen3-4B",
        "--save",
        f"{tmp_path}/Qwen3-4B_torch_dist",
        "--x",
        "1",
    ]
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    monkeypatch.setenv("SLURM_NODEID", "1")
    U.convert_checkpoint("M", "qwen3-4B", 8, multinode=True, hf_checkpoint="/hf", dir_dst=str(tmp_path))
    assert "--nnodes 2 --node-rank 1" in commands[1] and "--hf-checkpoint /hf" in commands[1]
    (tmp_path / "M_torch_dist").mkdir()
    (tmp_path / "M_torch_dist" / "latest_checkpointed_iteration.txt").write_text("release")
    U.convert_checkpoint("M", "qwen3-4B", 8, dir_dst=str(tmp_path))
    assert len(commands) == 2


def test_small_things(monkeypatch):
    assert (U.repo_base_dir / "train.py").is_file()
    assert Path(U.save_to_temp_file("text", "yaml")).read_text() == "text"
    assert U.create_run_id() != "" and U.NUM_GPUS_OF_HARDWARE["H100"] == 8
    monkeypatch.setenv("SOME_SWITCH", "1")
    assert U.get_bool_env_var("SOME_SWITCH") and not U.get_bool_env_var("NO_SUCH_SWITCH")
    assert U.get_bool_env_var("NO_SUCH_SWITCH", "true") and not U.get_env_enable_infinite_run()


@dataclass
class Options:
    model: str
    size: int = 4
    tags: list[str] = field(default_factory=list)


def test_the_fields_of_a_dataclass_become_options():
    @U.dataclass_cli
    def main(options: Options) -> Options:
        return options

    parameters = inspect.signature(main).parameters
    assert {name: p.annotation for name, p in parameters.items()} == {"model": str, "size": int, "tags": list[str]}
    assert parameters["model"].default is inspect.Parameter.empty and parameters["size"].default == 4
    assert main(model="m", size=5) == Options("m", 5)
    with pytest.raises(ConfigError, match="one dataclass"):
        U.dataclass_cli(takes_a_number)


def takes_a_number(number: int) -> None:
    """Not a dataclass."""
