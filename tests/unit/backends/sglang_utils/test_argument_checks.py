from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from slime.backends.sglang_utils.arguments import (
    cut_blocks,
    own_quantization_problems,
    precision_problems,
    quantized_problems,
    repacking_problems,
)
from slime.backends.sglang_utils.sglang_config import (
    ModelConfig,
    ServerGroupConfig,
    SGLangConfig,
    share_problems,
    size_problems,
)

GLM4_9B = {"intermediate_size": 13696}
QWEN3_4B = {"intermediate_size": 9728}
QWEN3_30B = {"intermediate_size": 6144, "moe_intermediate_size": 768}
MINIMAX_M2 = {"intermediate_size": 1536, "num_local_experts": 256}


FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}


def problems(shape: dict[str, int], num_gpus: int, *, ep: int = 1, dense_tp: int | None = None, pp: int = 1):
    flags = {"pp_size": pp, "ep_size": ep, "moe_dense_tp_size": dense_tp}
    group = ServerGroupConfig(worker_type="regular", num_gpus=num_gpus, num_gpus_per_engine=num_gpus, of_flags=flags)
    assert not list(cut_blocks("/hf", group, shape, is_of_file=False)), "a bf16 checkpoint may be cut anywhere"
    return list(cut_blocks("/hf", group, shape | FP8, is_of_file=False))


def test_ranks_that_would_cut_a_block_are_named_with_the_largest_engine_that_does_not():
    (found,) = problems(GLM4_9B, 2)  # SGLang's message on the GPU: output_partition_size = 6848 is not divisible
    assert "intermediate_size 13696" in found and "6848" in found and "--rollout-num-gpus-per-engine 1" in found
    (found,) = problems(QWEN3_4B, 8)
    assert "9728" in found and "1216" in found and "--rollout-num-gpus-per-engine 4" in found
    (found,) = problems(QWEN3_4B, 16, pp=2)
    assert "1216" in found and "--rollout-num-gpus-per-engine 8" in found, "GPUs, not ranks"
    (found,) = problems(QWEN3_30B, 8)
    assert "moe_intermediate_size 768" in found and "--rollout-num-gpus-per-engine 2" in found
    assert "--sglang-ep-size" in found
    (found,) = problems(MINIMAX_M2, 8)  # its experts use the key of an MLP's size
    assert "intermediate_size 1536" in found and "192" in found and "a larger --sglang-ep-size" in found


def test_blocks_of_each_model_are_judged_by_its_own_engines(tmp_path):
    models = []
    for name, shape, num_gpus, kind, overrides in (
        ("default", QWEN3_4B | FP8, 4, "regular", {}),  # a full engine, though flags would give each engine 8 GPUs
        ("staged", QWEN3_4B | FP8, 8, "regular", {"pp_size": 2}),
        ("judge", GLM4_9B | FP8, 2, "decode", {}),
        ("left", GLM4_9B | FP8, 2, "placeholder", {}),
        ("odd", GLM4_9B | FP8, 2, "regular", {"pp_size": "two"}),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(shape | {"model_type": "qwen3"}))
        group = ServerGroupConfig(
            worker_type=kind, num_gpus=num_gpus, num_gpus_per_engine=num_gpus, overrides=overrides,
            of_flags={"pp_size": 1, "ep_size": 1, "moe_dense_tp_size": None},
        )  # fmt: skip
        path = str(tmp_path / name)
        models.append(ModelConfig(name=name, model_path=path, update_weights=False, server_groups=(group,)))
    (found,) = quantized_problems(SGLangConfig(models=tuple(models), file="e.yaml"))
    assert f"{tmp_path / 'judge'} has FP8 blocks" in found and "(num_gpus_per_engine of --sglang-config 1)" in found


@pytest.mark.parametrize(
    ("shape", "asked", "overrides", "is_refused"),
    [
        (QWEN3_4B | FP8, None, {}, True),
        (QWEN3_4B, None, {}, False),
        (QWEN3_4B | FP8, "bfloat16", {}, False),
        (QWEN3_4B | FP8, "bfloat16", {"dtype": "float32"}, True),
    ],
)
def test_quantized_weights_are_not_served_in_fp32(tmp_path, shape, asked, overrides, is_refused):
    (tmp_path / "config.json").write_text(json.dumps(shape | {"model_type": "qwen3"}))
    group = ServerGroupConfig(
        worker_type="regular", num_gpus=1, num_gpus_per_engine=1, overrides=overrides, of_flags={"dtype": asked}
    )
    model = ModelConfig(name="default", model_path=str(tmp_path), update_weights=True, server_groups=(group,))
    found = list(precision_problems(SGLangConfig(models=(model,)), "float32"))
    assert ["Give --bf16" in problem for problem in found] == [True] * is_refused


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({}, []),
        ({"quantization": "fp8"}, ["default"]),
        ({"torchao_config": "int4wo-128"}, ["default", "packed"]),
        ({"quantization": "compressed-tensors"}, ["default"]),
    ],
)
def test_engines_that_would_quantize_pushed_weights_by_themselves_are_refused(tmp_path, options, found):
    models = []
    for name, method in (("default", None), ("packed", "compressed-tensors"), ("judge", None)):
        (tmp_path / name).mkdir()
        config = QWEN3_4B | {"quantization_config": {"quant_method": method}, "model_type": "qwen3"}
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        overrides = {"quantization": "compressed-tensors"} if name == "packed" else {}
        flags = {"quantization": None, "torchao_config": "", **options}
        group = ServerGroupConfig(
            worker_type="regular", num_gpus=1, num_gpus_per_engine=1, overrides=overrides, of_flags=flags
        )
        is_pushed, path = name != "judge", str(tmp_path / name)
        models.append(ModelConfig(name=name, model_path=path, update_weights=is_pushed, server_groups=(group,)))
    problems = list(own_quantization_problems(SGLangConfig(models=tuple(models))))
    assert [next(name for name in found if f"/{name}, which" in problem) for problem in problems] == found


def write_published(folder: Path, experts: torch.dtype) -> str:
    """A folder of two matrices with one-byte scales, the second in the experts' dtype."""
    scale = torch.ones(32, 1).to(torch.float8_e8m0fnu)
    tensors = {
        "layers.0.attn.wkv.weight": torch.ones(32, 32).to(torch.float8_e4m3fn),
        "layers.0.attn.wkv.scale": scale.clone(),
        "layers.0.ffn.experts.0.w1.weight": torch.ones(32, 16).to(experts),
        "layers.0.ffn.experts.0.w1.scale": scale.clone(),
    }
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "deepseek_v4", **FP8}))
    return str(folder)


RUNNER, EXCHANGE, GEMM = "moe_runner_backend", "moe_a2a_backend", "fp8_gemm_runner_backend"


@pytest.mark.parametrize(
    ("gpu", "experts", "flags", "overrides", "found"),
    [
        (0, torch.int8, {}, {}, []),
        (9, torch.int8, {}, {}, []),
        (
            9,
            torch.int8,
            {RUNNER: "marlin"},
            {},
            ["--sglang-moe-runner-backend .*'marlin'.* FP4 experts.*-push verified"],
        ),
        (9, torch.int8, {}, {RUNNER: "flashinfer_mxfp4"}, ["override moe_runner_backend .*'flashinfer_mxfp4'"]),
        (9, torch.int8, {RUNNER: "marlin"}, {RUNNER: "triton"}, []),
        (9, torch.int8, {EXCHANGE: "megamoe"}, {}, ["--sglang-moe-a2a-backend .*'megamoe'.*is none"]),
        (9, torch.float8_e4m3fn, {RUNNER: "marlin"}, {}, []),
        (12, torch.int8, {}, {}, ["--sglang-moe-runner-backend .*'auto'.* FP4 experts"]),
        (12, torch.float8_e4m3fn, {}, {}, []),
        (10, torch.float8_e4m3fn, {}, {}, ["--sglang-fp8-gemm-backend .*'auto'.* one-byte scales .*is triton"]),
        (10, torch.int8, {GEMM: "triton"}, {}, []),
        (10, torch.int8, {GEMM: "triton", EXCHANGE: "deepep"}, {}, ["runner-backend .*'auto'.* scales of experts"]),
        (10, torch.int8, {RUNNER: "deep_gemm"}, {GEMM: "deep_gemm"}, ["gemm-backend .*'deep_gemm'", "runner-backend"]),
    ],
)
def test_engines_that_would_repack_a_published_form_for_good_are_refused(
    tmp_path: Path, gpu: int, experts: torch.dtype, flags: dict[str, str], overrides: dict[str, str], found: list[str]
) -> None:
    settings = {RUNNER: "auto", EXCHANGE: "none", GEMM: "auto", **flags}
    group = ServerGroupConfig(
        worker_type="regular", num_gpus=1, num_gpus_per_engine=1, overrides=overrides, of_flags=settings
    )
    path = write_published(tmp_path, experts)
    for is_pushed in (True, False):
        model = ModelConfig(name="default", model_path=path, update_weights=is_pushed, server_groups=(group,))
        layout = SGLangConfig(models=(model,))
        problems = list(repacking_problems(layout, gpu=gpu, can_undo=False))
        assert len(problems) == (len(found) if is_pushed else 0), problems
        for problem, pattern in zip(problems, found):
            assert re.search(pattern, problem) and path in problem, problem


@pytest.mark.parametrize(
    ("gpu", "runner", "num_found"), [(9, "marlin", 0), (12, "auto", 0), (9, "flashinfer_mxfp4", 1)]
)
def test_engines_that_can_undo_the_repacking_may_serve_fp4_experts_with_marlin(tmp_path, gpu, runner, num_found):
    group = ServerGroupConfig(
        worker_type="regular", num_gpus=1, num_gpus_per_engine=1, overrides={},
        of_flags={RUNNER: runner, EXCHANGE: "none", GEMM: "auto"},
    )  # fmt: skip
    path = write_published(tmp_path, torch.int8)
    model = ModelConfig(name="default", model_path=path, update_weights=True, server_groups=(group,))
    problems = list(repacking_problems(SGLangConfig(models=(model,)), gpu=gpu, can_undo=True))
    assert len(problems) == num_found, problems


def test_each_group_of_engines_is_judged_by_its_own_size_and_overrides():
    groups = tuple(
        ServerGroupConfig(
            worker_type=kind, num_gpus=8, num_gpus_per_engine=num_gpus, overrides=overrides,
            of_flags={"pp_size": 1, "dp_size": 4, "ep_size": 1},
        )
        for kind, num_gpus, overrides in (
            ("prefill", 8, {"dp_size": 3}), ("decode", 4, {}), ("regular", 2, {"dp_size": 2}), ("placeholder", 1, {}),
        )
    )  # fmt: skip
    model = ModelConfig(name="default", model_path="m", update_weights=True, server_groups=groups)
    assert list(size_problems(SGLangConfig(models=(model,), file="e.yaml"))) == [
        "--sglang-config e.yaml: dp-size is 3 and the prefill engines of default have 8 GPUs: the 8 tensor-parallel "
        "ranks of an engine must divide into 3 groups; use 2."
    ]


@pytest.mark.parametrize(("overrides", "said"), [({}, "--sglang-pp-size is 2"), (
    {"pp_size": 3}, "--sglang-config e.yaml: pp-size is 3"
)])  # fmt: skip
def test_pipeline_stages_must_divide_the_gpus_of_each_group(overrides, said):
    flags = {"pp_size": 2, "dp_size": 1, "ep_size": 1}
    group = ServerGroupConfig(
        worker_type="regular", num_gpus=1, num_gpus_per_engine=1, overrides=overrides, of_flags=flags
    )
    model = ModelConfig(name="judge", model_path="m", update_weights=False, server_groups=(group,))
    (found,) = size_problems(SGLangConfig(models=(model,), file="e.yaml"))
    assert found.startswith(f"{said} and the regular engines of judge have 1 GPUs") and found.endswith("use 1.")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [({}, []), ({"mem_fraction_static": 0.6}, ["--sglang-config e.yaml sets mem_fraction_static"])],
)
def test_a_trainer_that_may_stay_awake_knows_what_the_engines_take(overrides, said):
    group = ServerGroupConfig(worker_type="regular", num_gpus=1, num_gpus_per_engine=1, overrides=overrides)
    model = ModelConfig(name="default", model_path="m", update_weights=True, server_groups=(group,))
    found = list(share_problems(SGLangConfig(models=(model,), file="e.yaml")))
    assert len(found) == len(said) and all(text in problem for text, problem in zip(said, found, strict=True))
