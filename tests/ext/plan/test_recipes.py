"""Every recipe of the repository, planned: valid, within its GPU and host memory, and as the documents say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.published_configs import PUBLISHED, WITHOUT_A_FILE
from slime.ext.plan.command import complete_run
from slime.ext.plan.make_plan import make_plan
from slime.ext.plan.plan import Plan, PlanOptions, find_card
from slime.ext.plan.recipe import read_recipe
from slime.ext.plan.trainer_memory import GIB
from tests.contracts.source_tree import REPO

RECIPES = sorted(path.name for path in REPO.glob("scripts/run-*.sh") if "tiny" not in path.name)
TERABYTE = 1e12


def planned(name: str, folder: Path, *more: str, **environment: str) -> tuple[Plan, list[str]]:
    """A recipe's plan for H100s, and all its problems."""
    recipe = read_recipe(str(REPO / "scripts" / name), more, folder)
    run = complete_run(recipe.words, folder)
    assert run.args is not None, run.problems
    options = PlanOptions(card=find_card("H100"), environment={**recipe.environment, **environment})
    plan = make_plan(run.args, run.hf_config, options)
    return plan, run.problems + plan.problems


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_legal_and_fits(name, tmp_path, caplog):
    plan, problems = planned(name, tmp_path)
    assert problems == []
    assert "is deprecated" not in caplog.text, "recipes have the flags of the pinned SGLang"
    assert plan.too_large == []
    assert plan.phases.train is not None and plan.phases.train < plan.card.memory
    if plan.engines:
        assert all(group.memory.kv_tokens > 10_000 for group in plan.engine_groups)


def test_the_recipe_of_kimi_k25_has_the_sizes_of_its_config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(WITHOUT_A_FILE["kimi-k2.5"]))
    plan, problems = planned("run-kimi-k2.5.sh", tmp_path, "--hf-checkpoint", str(tmp_path))
    assert problems == [] and round(plan.num_parameters / 1e9) == 1026


def test_the_stages_of_glm_52_begin_where_the_document_says(tmp_path):
    plan, _ = planned("run-glm5.2-744B-A40B.sh", tmp_path)
    assert [stage.first_layer for stage in plan.stages] == [1, 15, 23, 31, 39, 47, 55, 63]
    assert [stage.num_layers for stage in plan.stages] == [14, *[8] * 6, 16]
    assert round(plan.num_parameters / 1e9, 1) == 743.4
    assert (plan.num_gpus, plan.num_nodes, plan.sizes.data, plan.sizes.expert_data) == (256, 32, 1, 1)


def test_the_last_stage_of_deepseek_r1_has_13_layers_and_its_host_memory_is_the_documents_less_what_sleeps(tmp_path):
    plan, _ = planned("run-deepseek-r1.sh", tmp_path)
    assert [stage.num_layers for stage in plan.stages] == [16, 16, 16, 13]
    assert round(plan.num_parameters / 1e9) == 671
    slept = 8 * max(stage.memory.weights + stage.memory.gradients for stage in plan.stages)  # nothing keeps them here
    assert 1.35 < (plan.host.total + slept) / TERABYTE < 1.5
    assert plan.host.optimizer / plan.host.total > 0.35  # Adam's state is the largest part


def test_a_config_folder_decides_the_format_of_the_engines_weights(tmp_path):
    config = {**PUBLISHED["qwen3-4B"]}
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    plain, _ = planned("run-qwen3-4B.sh", tmp_path)
    fp8, problems = planned("run-qwen3-4B.sh", tmp_path, "--hf-checkpoint", str(tmp_path))
    assert problems == []
    assert plain.push is not None and fp8.push is not None
    assert plain.push.bytes_per_engine / GIB == pytest.approx(4.022e9 * 2 / GIB, rel=0.001)
    assert 0.5 < fp8.push.bytes_per_engine / plain.push.bytes_per_engine < 0.6
