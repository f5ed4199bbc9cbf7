"""Counted parameters against megatron-core's own model, rank by rank, in the layouts of the recipes and others."""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.published_configs import NUM_PARAMETERS, PUBLISHED, WITHOUT_A_FILE
from slime.backends.megatron_utils.flags.hf_config_check import read_hf_config
from slime.backends.megatron_utils.flags.model_dims import model_dims
from slime.backends.megatron_utils.flags.parallel import ParallelSizes, PipelineSplit
from slime.ext.plan.layout import rank_places, stage_chunks
from slime.ext.plan.parameters import Adapters, chunk_parameters, model_size, with_adapters
from slime.train_data.model_dims import ModelDims
from tests.contracts.source_tree import REPO
from tests.ext.vision.test_vision import SEEING
from tests.matrix import trainer
from tests.matrix.case import ROUTER_BIAS, FamilyCase, read_tensors
from tests.unit.backends.megatron_utils.megatron_case import parse
from tests.unit.scripts.test_model_files import write_config

GLM52_CONFIG = {
    "model_type": "glm_moe_dsa",
    "architectures": ["GlmMoeDsaForCausalLM"],
    "rope_theta": 8000000.0,
    "index_topk_freq": 4,
    "index_skip_topk_offset": 3,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 2048,
}
R1 = (
    "--tensor-model-parallel-size 8 --sequence-parallel --pipeline-model-parallel-size 4 --context-parallel-size 4 "
    "--expert-model-parallel-size 32 --expert-tensor-parallel-size 1 --decoder-last-pipeline-num-layers 13 "
    "--actor-num-nodes 16 --actor-num-gpus-per-node 8"
)
GLM52 = (
    "--tensor-model-parallel-size 4 --sequence-parallel --pipeline-model-parallel-size 8 --context-parallel-size 8 "
    "--decoder-first-pipeline-num-layers 14 --decoder-last-pipeline-num-layers 16 --expert-model-parallel-size 32 "
    "--expert-tensor-parallel-size 1 --actor-num-nodes 32 --actor-num-gpus-per-node 8"
)
GLM45 = (
    "--tensor-model-parallel-size 8 --sequence-parallel --pipeline-model-parallel-size 4 --context-parallel-size 2 "
    "--expert-model-parallel-size 16 --expert-tensor-parallel-size 1 --actor-num-nodes 8 --actor-num-gpus-per-node 8"
)
MINIMAX = (
    "--tensor-model-parallel-size 4 --sequence-parallel --pipeline-model-parallel-size 4 --context-parallel-size 2 "
    "--decoder-last-pipeline-num-layers 14 --expert-model-parallel-size 8 --expert-tensor-parallel-size 1 "
    "--actor-num-nodes 8 --actor-num-gpus-per-node 8"
)
# megatron-core needs seconds to build adapters for many experts, so those models have few layers.
CASES = {
    "Qwen3-4B": ("qwen3-4B", "--tensor-model-parallel-size 2 --actor-num-gpus-per-node 2", (0,)),
    "Qwen3-4B, tied over a pipeline": (
        "qwen3-4B",
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 3 --actor-num-gpus-per-node 2",
        (0, 1),
    ),
    "MiMo-7B, MTP trained": ("mimo-7B-rl", "--enable-mtp-training", (0,)),
    "GLM-4.5, MTP": ("glm4.5-355B-A32B", GLM45 + " --mtp-num-layers 1", (63,)),
    "Qwen3-30B-A3B, expert tensors": (
        "qwen3-30B-A3B",
        "--tensor-model-parallel-size 4 --expert-tensor-parallel-size 2 --expert-model-parallel-size 4 "
        "--actor-num-gpus-per-node 8",
        (5,),
    ),
    "Moonlight, custom layout": (
        "moonlight",
        "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et*3|(tt|)*2t*20L "
        "--actor-num-gpus-per-node 2",
        (1,),
    ),
    "GLM-4.7-Flash, uneven": (
        "glm4.7-30B-A3B",
        "--pipeline-model-parallel-size 2 --decoder-last-pipeline-num-layers 23 --actor-num-gpus-per-node 2 "
        "--mtp-num-layers 1 --enable-mtp-training",
        (1,),
    ),
    "MiniMax-M2": ("minimax-m2", MINIMAX, (17,)),
    "gpt-oss": (
        "gpt-oss-20b",
        "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 "
        "--expert-model-parallel-size 4 --actor-num-gpus-per-node 8",
        (7,),
    ),
    "Qwen3-Next": (
        "qwen3-next-80B-A3B",
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --expert-model-parallel-size 8 "
        "--expert-tensor-parallel-size 1 --decoder-last-pipeline-num-layers 22 --actor-num-nodes 2 "
        "--actor-num-gpus-per-node 8 --mtp-num-layers 1 --enable-mtp-training",
        (15,),
    ),
    "Nemotron 3 Nano": (
        "nemotron3-nano-30B-A3B",
        "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 "
        "--expert-model-parallel-size 4 --expert-tensor-parallel-size 1 --actor-num-gpus-per-node 8",
        (7,),
    ),
    "Qwen3.5-27B": (
        "qwen3.5-27B",
        "--tensor-model-parallel-size 4 --sequence-parallel --pipeline-model-parallel-size 2 "
        "--actor-num-gpus-per-node 8 --mtp-num-layers 1",
        (7,),
    ),
    "Qwen3-4B, adapters": (
        "qwen3-4B",
        "--tensor-model-parallel-size 2 --actor-num-gpus-per-node 2 --model-name qwen3 --lora-rank 16",
        (1,),
    ),
    "Qwen3-30B-A3B, an adapter that experts share": (
        "qwen3-30B-A3B",
        "--expert-model-parallel-size 2 --expert-tensor-parallel-size 2 --actor-num-gpus-per-node 4 "
        "--num-layers 6 --moe-layer-freq [1]*6 --model-name qwen3_moe --lora-rank 8 --lora-experts shared",
        (3,),
    ),
    "DeepSeek R1": ("deepseek-v3", R1, (40, 127)),
    "GLM-5.2": ("glm5.2-744B-A40B", GLM52, (0, 255)),
}


def model_args(name: str) -> list[str]:
    command = f"source scripts/models/{name}.sh; printf '%s\\n' \"${{MODEL_ARGS[@]}}\""
    return subprocess.run(
        ["bash", "-c", command], cwd=REPO, capture_output=True, text=True, check=True
    ).stdout.splitlines()


@pytest.fixture(scope="module")
def glm52_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("glm5.2")
    (folder / "config.json").write_text(json.dumps(GLM52_CONFIG))
    return folder


def flags_of(case: str, glm52_folder: Path) -> list[str]:
    name, layout, _ = CASES[case]
    checkpoint = ["--hf-checkpoint", str(glm52_folder)] if name.startswith("glm5") else []
    return [*checkpoint, *model_args(name), *layout.split()]


@pytest.fixture(scope="module")
def megatron_counts(glm52_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[object]]]:
    """[case] the counts of each of its ranks."""
    file = tmp_path_factory.mktemp("cases") / "cases.json"
    file.write_text(json.dumps([{"flags": flags_of(c, glm52_folder), "ranks": CASES[c][2]} for c in CASES]))
    done = subprocess.run(
        [sys.executable, "-m", "tests.ext.plan.megatron_counts", str(file)],
        cwd=REPO, capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(CASES, map(json.loads, done.stdout.splitlines()), strict=True))


def dims_of(args: Namespace) -> ModelDims:
    return model_dims(args, GLM52_CONFIG)


@pytest.mark.parametrize("case", CASES)
def test_every_rank_holds_what_megatron_builds(case, megatron_counts, glm52_folder):
    args = parse(*flags_of(case, glm52_folder), "--bf16")
    dims, sizes = dims_of(args), ParallelSizes.from_args(args)
    chunks = stage_chunks(PipelineSplit.from_args(args))
    places = rank_places(sizes, gpus_per_node=8)
    for rank, (dense, expert, frozen, layers) in zip(CASES[case][2], megatron_counts[case], strict=True):
        stage = chunks[places[rank].pipeline]
        count = chunk_parameters(stage, dims, sizes)
        if (adapters := Adapters.from_args(args)) is not None:
            count = with_adapters(count, stage, dims, sizes, adapters)
        assert (count.dense, count.expert, count.frozen) == (dense, expert, frozen)
        assert [layer + 1 for chunk in stage for layer in chunk.layers] == layers


@pytest.mark.parametrize("case", SEEING, ids=lambda case: case.name)
def test_a_plan_counts_the_tower_exactly(case: FamilyCase, tmp_path: Path):
    case.write_checkpoint(tmp_path)
    tensors = read_tensors(tmp_path)
    args = trainer.make_args(case, tmp_path)
    dims = model_dims(args, read_hf_config(str(tmp_path)))
    names = [name for name in tensors if name.startswith("model.visual.")]
    assert dims.tower.parameters == sum(tensors[name].numel() for name in names)
    assert dims.tower.is_trained
    whole = replace(dims, padded_vocab_size=dims.vocab_size)
    biases = sum(tensor.numel() for name, tensor in tensors.items() if name.endswith(ROUTER_BIAS))  # not parameters
    assert model_size(whole) == sum(tensor.numel() for tensor in tensors.values()) - biases


@pytest.mark.parametrize("name", NUM_PARAMETERS)
def test_a_config_alone_gives_the_model_its_published_number_of_parameters(name, tmp_path):
    config = {**PUBLISHED, **WITHOUT_A_FILE}[name]
    dims = model_dims(parse(*write_config(tmp_path, config), "--make-vocab-size-divisible-by", "1"), config)
    assert model_size(dims) == NUM_PARAMETERS[name]
