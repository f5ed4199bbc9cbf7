"""The recipes: each is run with a recorder in the place of ``ray``, and what it submits is parsed."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest

from slime.arguments import parse_flags
from tests.contracts.seed_commands import SEED_COMMANDS

REPO = Path(__file__).parents[3]
RECIPES = {
    # script -> the seed's flag group that it must contain, and the GPUs of a node in the seed
    "run-glm4-9B.sh": "GLM4 9B",
    "run-glm4.5-355B-A32B.sh": "GLM-4.5 355B",
    "run-deepseek-r1.sh": "DeepSeek R1",
    "run-glm5.2-744B-A40B.sh": "GLM-5.2 744B",
    "run-glm4.7-30B-A3B-8gpus.sh": "GLM-4.7 Flash",
    "run-glm4.7-30B-A3B.sh": None,
    "run-mimo-7B-rl-eagle.sh": None,
    "run-qwen3-4B.sh": None,
    "run-qwen3-4B-base-sft.sh": None,
}
NOT_LITERAL = {
    # flags of a seed's text that its recipe spells otherwise, leaves to the user, or that name the seed's own folders
    "GLM4 9B": {"rotary_base"},
    "GLM-4.5 355B": set(),
    "DeepSeek R1": {"sglang_enable_ep_moe", "sglang_enable_deepep_moe"},
    "GLM-5.2 744B": {"sglang_config", "sglang_disaggregation_ib_device"},
    "GLM-4.7 Flash": {
        *("sglang_speculative_algorithm", "sglang_speculative_num_steps", "sglang_speculative_eagle_topk"),
        *("sglang_speculative_num_draft_tokens", "mtp_num_layers", "enable_mtp_training", "mtp_loss_scaling_factor"),
    },
}
FOLDERS = {"hf_checkpoint", "ref_load", "load", "save", "prompt_data", "eval_prompt_data"}


def submitted(script: str, tmp_path: Path, *words: str, **variables: str) -> tuple[list[str], dict[str, str]]:
    """What ``ray job submit`` gets: the words behind ``--``, and the job's environment."""
    record = tmp_path / "record"
    recorder = f'ray() {{ printf "%s\\n" "$@" >"{record}"; }}; nvidia-smi() {{ printf "GPU 0\\nGPU 1\\n"; }}'
    environment = dict(os.environ) | {"SLIME_SCRIPT_EXTERNAL_RAY": "1", "BASE_DIR": "/base", "MASTER_ADDR": "10.0.0.1"}
    command = f"{recorder}; export -f ray nvidia-smi; exec {shlex.quote(str(REPO / script))} {shlex.join(words)}"
    subprocess.run(["bash", "-c", command], env=environment | variables, check=True, timeout=120)
    lines = record.read_text().splitlines()
    job = lines[lines.index("--") + 1 :]
    return job, json.loads(lines[lines.index("--runtime-env-json") + 1])["env_vars"]


def test_every_recipe_is_looked_at():
    there = {path.name for path in REPO.glob("scripts/run-*.sh") if "tiny" not in path.name}
    assert there == set(RECIPES)


@pytest.mark.parametrize("script", RECIPES)
def test_a_recipe_submits_flags_that_exist(script, tmp_path):
    job, environment = submitted(f"scripts/{script}", tmp_path, "--num-rollout", "7")
    assert job[0] == "python3"
    assert (REPO / job[1]).is_file()
    args = parse_flags(job[2:])
    assert args.num_rollout == 7  # what the user adds comes last, and wins
    assert environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert str(REPO) in environment["PYTHONPATH"]


@pytest.mark.parametrize("script", [script for script, seed in RECIPES.items() if seed])
def test_a_recipe_holds_the_flags_of_its_document(script, tmp_path):
    seed = RECIPES[script]
    job, _ = submitted(f"scripts/{script}", tmp_path)
    asked = vars(parse_flags(shlex.split(SEED_COMMANDS[seed])))
    plain = vars(parse_flags([]))
    given = vars(parse_flags(job[2:]))
    for name, value in asked.items():
        if value == plain[name] or name in NOT_LITERAL[seed]:
            continue
        if name in FOLDERS:
            assert Path(str(given[name][0] if isinstance(given[name], list) else given[name])).name
        else:
            assert given[name] == value, f"--{name.replace('_', '-')}"


def test_the_seed_spelling_of_the_folder_works(tmp_path):
    job, _ = submitted("script/run-glm4-9B.sh", tmp_path)
    assert job[1] == "train.py"


def test_fp8_rollout_of_glm_45_is_the_documents(tmp_path):
    job, _ = submitted("scripts/run-glm4.5-355B-A32B.sh", tmp_path, FP8="1")
    given = vars(parse_flags(job[2:]))
    asked = vars(parse_flags(shlex.split(SEED_COMMANDS["GLM-4.5 355B, FP8 rollout"])))
    plain = vars(parse_flags([]))
    assert {n: given[n] for n, v in asked.items() if v != plain[n]} == {
        n: v for n, v in asked.items() if v != plain[n]
    }
    assert given["hf_checkpoint"].endswith("GLM-4.5-355B-A32B-FP8")


@pytest.mark.parametrize("script", [name for name in RECIPES if "glm4.5" in name or "r1" in name or "5.2" in name])
def test_the_network_interface_reaches_every_process(script, tmp_path):
    _, environment = submitted(f"scripts/{script}", tmp_path, SOCKET_IFNAME="bond7")
    for name in ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        assert environment[name] == "bond7"


def test_without_its_folder_a_recipe_of_several_nodes_says_what_is_missing():
    environment = {name: value for name, value in os.environ.items() if name != "BASE_DIR"}
    done = subprocess.run(
        ["bash", str(REPO / "scripts/run-deepseek-r1.sh")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 2
    assert "BASE_DIR is not set" in done.stderr
