"""Every recipe of the repository, planned: legal, within its card and its host, and as the documents say of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.published_configs import PUBLISHED
from slime.ext.plan.command import complete_run
from slime.ext.plan.make_plan import make_plan
from slime.ext.plan.plan import Plan, PlanOptions, find_card
from slime.ext.plan.recipe import read_recipe
from slime.ext.plan.trainer_memory import GIB
from tests.contracts.source_tree import REPO
from tests.unit.scripts.test_model_files import model_args

RECIPES = sorted(path.name for path in REPO.glob("scripts/run-*.sh") if "tiny" not in path.name)
TERABYTE = 1e12
GEO3K = """--actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate --rollout-num-gpus-per-engine 8
--prompt-data /root/geo3k/train.parquet --input-key problem --label-key answer --multimodal-keys {"image":"images"}
--apply-chat-template --rm-type math --num-rollout 10 --rollout-batch-size 64 --n-samples-per-prompt 8
--rollout-max-response-len 4096 --global-batch-size 512 --use-dynamic-batch-size --max-tokens-per-gpu 4096 --bf16"""


def planned(name: str, folder: Path, *more: str, **environment: str) -> tuple[Plan, list[str]]:
    """The plan of a recipe for H100s, and all that is wrong with it."""
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


@pytest.mark.parametrize(("model", "billions"), [("Qwen3.5-35B-A3B", 35.1), ("Qwen3.5-0.8B", 0.75)])
def test_the_tower_of_a_published_model_is_known_without_its_config_json(model, billions, tmp_path):
    name = model.replace("Qwen", "qwen")
    words = [*model_args(name), "--hf-checkpoint", f"/root/{model}", "--ref-load", f"/root/{model}", *GEO3K.split()]
    run = complete_run(words, tmp_path)
    assert run.args is not None and run.problems == []
    plan = make_plan(run.args, run.hf_config, PlanOptions(card=find_card("H100")))
    assert plan.num_parameters / 1e9 == pytest.approx(billions, rel=0.01)


def test_a_vision_folder_around_a_known_language_model_is_not_planned(tmp_path):
    text = {**PUBLISHED["qwen2.5-7B"]}
    config = {"model_type": "mistral3", "text_config": text, "vision_config": {"hidden_size": 64}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    flags = GEO3K.replace('--multimodal-keys {"image":"images"}', "").split()
    words = [*model_args("qwen2.5-7B"), "--hf-checkpoint", str(tmp_path), *flags]
    (problem, *_) = complete_run(words, tmp_path).problems
    assert "'mistral3'; weights can be converted for" in problem


def test_the_stages_of_glm_52_begin_where_the_document_says(tmp_path):
    plan, _ = planned("run-glm5.2-744B-A40B.sh", tmp_path)
    assert [stage.first_layer for stage in plan.stages] == [1, 15, 23, 31, 39, 47, 55, 63]
    assert [stage.num_layers for stage in plan.stages] == [14, *[8] * 6, 16]
    assert round(plan.num_parameters / 1e9, 1) == 743.4
    assert (plan.num_gpus, plan.num_nodes, plan.sizes.data, plan.sizes.expert_data) == (256, 32, 1, 1)


def test_the_engines_of_glm_52_are_one_that_prefills_and_three_that_decode(tmp_path):
    plan, _ = planned("run-glm5.2-744B-A40B.sh", tmp_path)
    assert [(e.worker_type, e.first_gpu, len(e.nodes)) for e in plan.engines] == [
        ("prefill", 0, 8), ("decode", 64, 8), ("decode", 128, 8), ("decode", 192, 8),
    ]  # fmt: skip
    assert plan.engines[3].nodes == tuple(range(24, 32))


def test_glm_52_with_too_small_a_dispatch_buffer_is_told(tmp_path):
    _, problems = planned("run-glm5.2-744B-A40B.sh", tmp_path, SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK="32")
    (problem,) = [problem for problem in problems if "decode" in problem]
    assert "is 32" in problem and "12 requests" in problem and "5 draft tokens = 60" in problem and "64" in problem


def test_glm_52_cut_evenly_over_six_stages_is_refused_with_the_layer(tmp_path):
    flags = ["--pipeline-model-parallel-size", "6", "--decoder-first-pipeline-num-layers", "13"]
    flags += ["--decoder-last-pipeline-num-layers", "13", "--actor-num-nodes", "24", "--rollout-num-gpus", "256"]
    recipe = read_recipe(str(REPO / "scripts/run-glm5.2-744B-A40B.sh"), flags, tmp_path)
    assert any("starts at layer 14" in problem for problem in complete_run(recipe.words, tmp_path).problems)


def test_the_last_stage_of_deepseek_r1_has_13_layers_and_its_host_memory_is_the_documents_less_what_sleeps(tmp_path):
    plan, _ = planned("run-deepseek-r1.sh", tmp_path)
    assert [stage.num_layers for stage in plan.stages] == [16, 16, 16, 13]
    assert round(plan.num_parameters / 1e9) == 671
    slept = 8 * max(stage.memory.weights + stage.memory.gradients for stage in plan.stages)  # here nobody keeps them
    assert 1.35 < (plan.host.total + slept) / TERABYTE < 1.5
    assert plan.host.optimizer / plan.host.total > 0.35  # Adam's state is the largest part


def test_deepseek_r1_on_half_the_nodes_with_an_old_actor_does_not_fit_its_hosts(tmp_path):
    plan, problems = planned(
        "run-deepseek-r1.sh", tmp_path, "--actor-num-nodes", "8", "--pipeline-model-parallel-size", "2",
        "--decoder-last-pipeline-num-layers", "30", "--keep-old-actor",
    )  # fmt: skip
    assert problems == []
    assert any(line.startswith("host: ") for line in plan.too_large)


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
