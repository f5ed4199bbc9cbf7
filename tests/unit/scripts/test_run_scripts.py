"""The recipes: each runs with a recorder instead of ``ray``, and what it submits is parsed."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from slime.compose import parse_flags
from tests.contracts.seed_commands import SEED_COMMANDS
from tests.contracts.source_tree import REPO

RECIPES = {
    # script -> the seed's flag group that it must contain, and the seed's GPUs per node
    "run-glm4-9B.sh": "GLM4 9B",
    "run-glm4.5-355B-A32B.sh": "GLM-4.5 355B",
    "run-deepseek-r1.sh": "DeepSeek R1",
    "run-glm5.2-744B-A40B.sh": "GLM-5.2 744B",
    "run-glm4.7-30B-A3B-8gpus.sh": "GLM-4.7 Flash",
}
WITHOUT_RECIPE = {
    *("deepseek-v3-5layer", "deepseek-v3-20layer"),  # shortened models for experiments
    "tiny-arithmetic",
}
NOT_LITERAL = {
    # flags that recipes spell differently, leave to the user, or that name the seed's own folders
    "GLM4 9B": {"rotary_base"},
    "GLM-4.5 355B": set(),
    "DeepSeek R1": {"sglang_enable_ep_moe", "sglang_enable_deepep_moe"},
    "GLM-5.2 744B": {"sglang_config", "sglang_disaggregation_ib_device"},
    "GLM-4.7 Flash": {
        *("sglang_speculative_algorithm", "sglang_speculative_num_steps", "sglang_speculative_eagle_topk"),
        *("sglang_speculative_num_draft_tokens", "mtp_num_layers", "enable_mtp_training", "mtp_loss_scaling_factor"),
    },
}
SPELLED_TODAY = {"nsa": "dsa"}
"""Values that the pinned SGLang has renamed; it still accepts the old ones."""
FOLDERS = {"hf_checkpoint", "ref_load", "load", "save", "prompt_data", "eval_prompt_data"}


def submitted(script: str, tmp_path: Path, *words: str, **variables: str) -> tuple[list[str], dict[str, str]]:
    """The arguments of ``ray job submit``: the words after ``--``, and the job's environment."""
    record = tmp_path / "record"
    recorder = f'ray() {{ printf "%s\\n" "$@" >"{record}"; }}; nvidia-smi() {{ seq 8; }}'
    environment = dict(os.environ) | {"SLIME_SCRIPT_EXTERNAL_RAY": "1", "BASE_DIR": "/base", "MASTER_ADDR": "10.0.0.1"}
    environment["TMPDIR"] = str(tmp_path)
    command = f"{recorder}; export -f ray nvidia-smi; exec {shlex.quote(str(REPO / script))} {shlex.join(words)}"
    subprocess.run(["bash", "-c", command], env=environment | variables, check=True, timeout=120)
    lines = record.read_text().splitlines()
    job = lines[lines.index("--") + 1 :]
    return job, json.loads(lines[lines.index("--runtime-env-json") + 1])["env_vars"]


def test_every_model_has_a_recipe():
    """``tests/ext/plan/test_recipes.py`` plans every recipe."""
    there = {path.name for path in REPO.glob("scripts/run-*.sh") if "tiny" not in path.name}
    sourced = {
        word for name in there for word in re.findall(r"models/([^\"]+)\.sh", (REPO / "scripts" / name).read_text())
    }
    models = {path.stem for path in REPO.glob("scripts/models/*.sh")}
    assert sourced | WITHOUT_RECIPE == models and not sourced & WITHOUT_RECIPE


@pytest.mark.parametrize("path", sorted(REPO.glob("scripts/low_precision/*-int4.sh")), ids=lambda path: path.stem)
def test_a_recipe_in_int4_is_its_model_s_with_rounded_weights(path, tmp_path):
    words = ("--num-rollout", "7")
    job, _ = submitted(str(path.relative_to(REPO)), tmp_path, *words)
    plain, _ = submitted(f"scripts/{path.name.replace('-int4', '')}", tmp_path, *words)
    args, other = parse_flags(job[2:]), parse_flags(plain[2:])
    assert args.num_rollout == 7  # the user's flags come last and win
    different = {name for name, value in vars(args).items() if value != vars(other)[name]}
    assert {"int4_qat", "int4_qat_group_size"} <= different <= {"int4_qat", "int4_qat_group_size", "hf_checkpoint"}
    columns = args.moe_ffn_hidden_size // (args.expert_tensor_parallel_size or args.tensor_model_parallel_size)
    assert columns % args.int4_qat_group_size == 0 == args.hidden_size % args.int4_qat_group_size


@pytest.mark.parametrize("path", sorted(REPO.glob("scripts/low_precision/*-fp8.sh")), ids=lambda path: path.stem)
def test_a_recipe_in_fp8_is_its_model_s_with_fp8_on_both_sides(path, tmp_path):
    job, _ = submitted(str(path.relative_to(REPO)), tmp_path)
    plain, _ = submitted(f"scripts/{path.name.replace('-fp8', '')}", tmp_path)
    args, other = parse_flags(job[2:]), parse_flags(plain[2:])
    assert {name for name, value in vars(args).items() if value != vars(other)[name]} == {
        "hf_checkpoint",
        "fp8",
        "fp8_recipe",
    }
    assert (args.fp8, args.fp8_recipe) == ("e4m3", "blockwise")
    assert args.hf_checkpoint.endswith("-FP8")


@pytest.mark.parametrize("script", RECIPES)
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
            today = SPELLED_TODAY.get(value, value) if isinstance(value, str) else value
            assert given[name] == today, f"--{name.replace('_', '-')}"
