"""The recipes: each is run with a recorder in the place of ``ray``, and what it submits is parsed."""

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
MORE_RECIPES = [
    *("run-qwen3-0.6B.sh", "run-qwen3-1.7B.sh", "run-qwen3-4B-Instruct-2507.sh", "run-qwen3-8B.sh"),
    *("run-qwen3-14B.sh", "run-qwen3-32B.sh", "run-qwen3-30B-A3B.sh", "run-qwen3-235B-A22B.sh"),
    *("run-qwen2.5-0.5B.sh", "run-qwen2.5-1.5B.sh", "run-qwen2.5-3B.sh", "run-qwen2.5-7B.sh", "run-qwen2.5-32B.sh"),
    *("run-llama3.2-1B-Instruct.sh", "run-llama3.2-3B-Instruct.sh", "run-llama3.1-8B-Instruct.sh"),
    *("run-glm4-32B.sh", "run-glm4.5-106B-A12B.sh", "run-glm4.6-355B-A32B.sh", "run-glm4.7-355B-A32B.sh"),
    *("run-glm5-744B-A40B.sh", "run-deepseek-v3.sh", "run-moonlight-16B-A3B.sh"),
    *("run-kimi-k2-Instruct.sh", "run-kimi-k2-Thinking.sh", "run-minimax-m2.sh"),
    *("run-qwen3-next-80B-A3B.sh", "run-qwen3.5-0.8B.sh", "run-qwen3.5-4B.sh", "run-qwen3.5-4B-base-sft.sh"),
    *("run-qwen3.5-9B.sh", "run-qwen3.5-27B.sh", "run-qwen3.5-35B-A3B.sh", "run-gemma3-1B.sh"),
    *("run-gpt-oss-20b.sh", "run-gpt-oss-120b.sh", "run-qwen3-vl-30B-A3B.sh"),
    *("run-mixtral-8x7B.sh", "run-seed-oss-36B.sh", "run-olmo3-7B.sh", "run-glm4.6V-106B-A12B.sh"),
    *("run-mistral-small-3.1-24B.sh", "run-gemma4-31B.sh", "run-nemotron3-nano-30B-A3B.sh"),
    "run-qwen2.5-vl-7B.sh",
]
"""Recipes of models that no document names."""
WITHOUT_RECIPE = {
    *("deepseek-v3-5layer", "deepseek-v3-20layer"),  # cut for trying things out
    "tiny-arithmetic",
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
SPELLED_TODAY = {"nsa": "dsa"}
"""Values that the pinned SGLang has under another name; it still takes the old one."""
FOLDERS = {"hf_checkpoint", "ref_load", "load", "save", "prompt_data", "eval_prompt_data"}


def submitted(script: str, tmp_path: Path, *words: str, **variables: str) -> tuple[list[str], dict[str, str]]:
    """What ``ray job submit`` gets: the words behind ``--``, and the job's environment."""
    record = tmp_path / "record"
    recorder = f'ray() {{ printf "%s\\n" "$@" >"{record}"; }}; nvidia-smi() {{ seq 8; }}'
    environment = dict(os.environ) | {"SLIME_SCRIPT_EXTERNAL_RAY": "1", "BASE_DIR": "/base", "MASTER_ADDR": "10.0.0.1"}
    environment["TMPDIR"] = str(tmp_path)
    command = f"{recorder}; export -f ray nvidia-smi; exec {shlex.quote(str(REPO / script))} {shlex.join(words)}"
    subprocess.run(["bash", "-c", command], env=environment | variables, check=True, timeout=120)
    lines = record.read_text().splitlines()
    job = lines[lines.index("--") + 1 :]
    return job, json.loads(lines[lines.index("--runtime-env-json") + 1])["env_vars"]


def test_every_model_has_a_recipe_and_every_recipe_is_looked_at():
    there = {path.name for path in REPO.glob("scripts/run-*.sh") if "tiny" not in path.name}
    assert there == set(RECIPES) | set(MORE_RECIPES)
    sourced = {
        word for name in there for word in re.findall(r"models/([^\"]+)\.sh", (REPO / "scripts" / name).read_text())
    }
    models = {path.stem for path in REPO.glob("scripts/models/*.sh")}
    assert sourced | WITHOUT_RECIPE == models and not sourced & WITHOUT_RECIPE


def layout_faults(args) -> list[str]:
    """What cannot be: layers, heads and experts over ranks, engines over GPUs."""
    num_gpus = args.actor_num_nodes * args.actor_num_gpus_per_node
    tp, pp, cp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.context_parallel_size
    ends = [args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers]
    given = [layers for layers in ends if layers is not None]
    dp = num_gpus // (tp * pp * cp)
    groups = args.num_query_groups or args.num_attention_heads
    rules = {
        "GPUs": num_gpus % (tp * pp * cp) == 0,
        "layers": (args.num_layers - sum(given)) % max(pp - len(given), 1) == 0,
        "heads": args.num_attention_heads % tp == 0 and (groups % tp == 0 or tp % groups == 0),
        "sequence parallel": args.sequence_parallel or tp == 1,
        "experts": (args.num_experts or args.expert_model_parallel_size) % args.expert_model_parallel_size == 0,
        "expert ranks": tp * cp * dp % args.expert_model_parallel_size == 0,
        "executions": args.global_batch_size is None or args.global_batch_size % dp == 0,
    }
    if not args.debug_train_only:
        per_engine = args.rollout_num_gpus_per_engine
        attention_tp = per_engine // (args.sglang_dp_size if args.sglang_enable_dp_attention else 1)
        rules["engines"] = num_gpus % per_engine == 0
        rules["engine heads"] = args.num_attention_heads % attention_tp == 0
        rules["engine experts"] = (args.num_experts or 0) % args.sglang_ep_size == 0
    return [name for name, holds in rules.items() if not holds]


@pytest.mark.parametrize("script", [*RECIPES, *MORE_RECIPES])
def test_a_recipe_submits_flags_that_exist(script, tmp_path):
    job, environment = submitted(f"scripts/{script}", tmp_path, "--num-rollout", "7")
    assert job[0] == "python3"
    assert (REPO / job[1]).is_file()
    args = parse_flags(job[2:])
    assert args.num_rollout == 7  # what the user adds comes last, and wins
    assert layout_faults(args) == []
    assert environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert str(REPO) in environment["PYTHONPATH"]


@pytest.mark.parametrize("path", sorted(REPO.glob("scripts/low_precision/*-int4.sh")), ids=lambda path: path.stem)
def test_a_recipe_in_int4_is_its_model_s_with_rounded_weights(path, tmp_path):
    words = ("--num-rollout", "7")
    job, _ = submitted(str(path.relative_to(REPO)), tmp_path, *words)
    plain, _ = submitted(f"scripts/{path.name.replace('-int4', '')}", tmp_path, *words)
    args, other = parse_flags(job[2:]), parse_flags(plain[2:])
    assert layout_faults(args) == []
    different = {name for name, value in vars(args).items() if value != vars(other)[name]}
    assert {"int4_qat", "int4_qat_group_size"} <= different <= {"int4_qat", "int4_qat_group_size", "hf_checkpoint"}
    columns = args.moe_ffn_hidden_size // (args.expert_tensor_parallel_size or args.tensor_model_parallel_size)
    assert columns % args.int4_qat_group_size == 0 == args.hidden_size % args.int4_qat_group_size


@pytest.mark.parametrize("path", sorted(REPO.glob("scripts/low_precision/*-fp8.sh")), ids=lambda path: path.stem)
def test_a_recipe_in_fp8_is_its_model_s_with_fp8_on_both_sides(path, tmp_path):
    job, _ = submitted(str(path.relative_to(REPO)), tmp_path)
    plain, _ = submitted(f"scripts/{path.name.replace('-fp8', '')}", tmp_path)
    args, other = parse_flags(job[2:]), parse_flags(plain[2:])
    assert layout_faults(args) == []
    assert {name for name, value in vars(args).items() if value != vars(other)[name]} == {
        "hf_checkpoint",
        "fp8",
        "fp8_recipe",
    }
    assert (args.fp8, args.fp8_recipe) == ("e4m3", "blockwise")
    assert args.hf_checkpoint.endswith("-FP8")


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
            today = SPELLED_TODAY.get(value, value) if isinstance(value, str) else value
            assert given[name] == today, f"--{name.replace('_', '-')}"
