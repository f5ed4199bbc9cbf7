"""Flags that conflict with the checkpoint's vision tower, or with its absence."""

from __future__ import annotations

import sys
from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from slime.backends.megatron_utils.flags.model_dims import model_dims
from slime.compose import flag_groups
from slime.ext.plan.command import complete_run
from slime.ext.vision.checks import encoder_problems, tower_problems
from slime.utils.errors import ConfigError
from tests.matrix.case import load_cases, read_config
from tests.unit.backends.megatron_utils.megatron_case import parse


def test_a_run_on_text_imports_nothing_of_towers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("checks", "images", "towers", "transform"):
        monkeypatch.setitem(sys.modules, f"slime.ext.vision.{name}", None)  # importing it is an error
    for name, is_text in (("qwen3", True), ("qwen3_vl", False)):
        case = load_cases([name])[name]
        case.write_checkpoint(tmp_path / name)
        flags = (*case.flags(tmp_path / name), "--hf-checkpoint", str(tmp_path / name))
        with nullcontext() if is_text else pytest.raises(ImportError):
            args = parse(*flags)
    assert not args.has_own_tower and args.tower_dims is None


@pytest.mark.parametrize(
    ("split", "layers"),
    [
        ({"pipeline_model_parallel_size": 3}, 1),
        ({"pipeline_model_parallel_size": 2, "decoder_first_pipeline_num_layers": 1}, 1),
        ({"pipeline_model_parallel_size": 2, "decoder_last_pipeline_num_layers": 2}, 1),
        ({"pipeline_model_parallel_size": 2, "account_for_embedding_in_pipeline_split": True}, 1),
        ({"virtual_pipeline_model_parallel_size": 3}, 1),
        ({"decoder_last_pipeline_num_layers": 2}, None),  # with one stage; another check refuses it
        ({"pipeline_model_parallel_size": 2, "decoder_first_pipeline_num_layers": 2}, None),
        ({}, None),
    ],
)
def test_layers_that_take_features_are_on_the_first_stage(
    tmp_path: Path, split: dict[str, Any], layers: int | None
) -> None:
    case = load_cases(["qwen3_vl"])["qwen3_vl"]  # three layers, two use features
    case.write_checkpoint(tmp_path)
    args = parse(*case.flags(tmp_path), "--hf-checkpoint", str(tmp_path))
    vars(args).update(split)
    found = [problem.partition(";")[0] for problem in tower_problems(args, read_config(tmp_path))]
    assert found == ([f"The first pipeline stage has {layers} layers"] if layers else [])


def test_columns_of_videos_and_sound_are_refused_for_a_tower(tmp_path: Path) -> None:
    case = load_cases(["glm4v"])["glm4v"]
    case.write_checkpoint(tmp_path)
    args = parse(*case.flags(tmp_path), "--hf-checkpoint", str(tmp_path))
    args.multimodal_keys = {"video": "films", "image": "images", "audio": "sounds"}
    (problem,) = tower_problems(args, read_config(tmp_path))
    assert problem.startswith("--multimodal-keys has audio, video; the vision towers here")
    args.custom_model_provider_path = "mine.provider"
    assert not list(tower_problems(args, read_config(tmp_path)))


@pytest.mark.parametrize("name", ["gemma4", "gemma4-moe", "mistral3", "kimi_k25"])
@pytest.mark.parametrize("flags", [("--multimodal-keys", '{"image": "images"}'), ("--train-vision-tower",)])
def test_images_for_a_folder_whose_text_alone_is_trained_are_refused_by_its_name(
    name: str, flags: tuple[str, ...], tmp_path: Path
) -> None:
    """Gemma 4's images are tokens that attend to each other both ways, which no attention here does."""
    case = load_cases([name])[name]
    case.write_checkpoint(tmp_path)
    kind = case.config["model_type"]
    with pytest.raises(ConfigError, match=rf"{flags[0]} is given, but the trainer has no vision tower for a {kind}; "):
        parse(*case.flags(tmp_path), "--hf-checkpoint", str(tmp_path), *flags)


@pytest.mark.parametrize(
    ("model", "is_refused"), [("", True), ("update_weights: false, ", False), ("model_path: /another, ", False)]
)
def test_encoders_hold_a_tower_that_stays_as_it_is(model: str, is_refused: bool, tmp_path: Path) -> None:
    groups = "{worker_type: regular, num_gpus: 2}, {worker_type: encoder, num_gpus: 2}"
    path = tmp_path / "engines.yaml"
    path.write_text(f"sglang: [{{name: m, {model}server_groups: [{groups}]}}]")
    args = Namespace(
        sglang_config=str(path), hf_checkpoint="/folder", rollout_num_gpus_per_engine=2, debug_train_only=False,
        train_vision_tower=True,
    )  # fmt: skip
    found = [problem.partition("and --")[2].partition(" ")[0] for problem in encoder_problems(args)]
    assert found == (["train-vision-tower"] if is_refused else [])
    args.train_vision_tower = False
    assert not list(encoder_problems(args))


@pytest.mark.parametrize(
    ("flag", "problem"),
    [("--debug-rollout-only", ""), ("--recompute-granularity=full", "recompute-method must be")],
)
def test_a_plan_knows_the_tower_of_a_run_without_a_trainer_and_of_one_that_is_refused(
    tmp_path: Path, flag: str, problem: str
) -> None:
    case = load_cases(["qwen3_vl"])["qwen3_vl"]
    case.write_checkpoint(tmp_path)
    run = "--num-rollout 1 --rollout-batch-size 8 --prompt-data /x.jsonl --rm-type math --colocate"
    words = [*map(str, case.flags(tmp_path)), "--hf-checkpoint", str(tmp_path), *run.split(), flag]
    planned = complete_run(words, tmp_path, flag_groups())
    assert problem in "".join(planned.problems) and bool(planned.problems) == bool(problem)
    assert planned.args is not None and model_dims(planned.args, planned.hf_config).tower is not None
