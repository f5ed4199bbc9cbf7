"""The documents' conversion commands: which process gets which layers, and that all flags are accepted."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest

from slime.backends.megatron_utils.arguments import validate_megatron_arguments
from slime.utils.errors import ConfigError
from tests.unit.scripts.test_model_files import PUBLISHED, model_args
from tools.convert_hf_to_torch_dist import parse, pipeline_split, with_layout
from tools.convert_torch_dist_to_hf import _drop_quantization


def layout(folder: Path, model: str, processes: int, flags: str = "") -> Namespace:
    """Complete arguments of a conversion of a published model."""
    (folder / "config.json").write_text(json.dumps(PUBLISHED[model]))
    argv = [*model_args(model), *flags.split(), "--hf-checkpoint", str(folder), "--save", str(folder / "dist")]
    args = with_layout(parse(argv), processes)
    validate_megatron_arguments(args)
    return args


@pytest.mark.parametrize(
    ("model", "processes", "flags", "stages", "first", "last"),
    [
        ("glm4.5-355B-A32B", 16, "", 16, None, 2),
        ("glm4-9B", 1, "", 1, None, None),
        (
            *("deepseek-v3", 32),
            "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 8 --expert-tensor-parallel-size 1 "
            "--expert-model-parallel-size 4 --decoder-first-pipeline-num-layers 7 "
            "--decoder-last-pipeline-num-layers 6",
            *(8, 7, 6),
        ),
        (
            *("glm5.2-744B-A40B", 32),
            "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 2 --decoder-last-pipeline-num-layers 40 "
            "--expert-model-parallel-size 16 --expert-tensor-parallel-size 1",
            *(2, None, 40),
        ),
        ("glm4.7-30B-A3B", 8, "", 8, None, 5),
    ],
    ids=["seed 000", "seed 001", "seed 002", "seed 003", "seed 004"],
)
def test_the_commands_of_the_seeds_are_laid_out_as_they_say(tmp_path, model, processes, flags, stages, first, last):
    args = layout(tmp_path, model, processes, flags)
    assert args.world_size == processes
    assert args.pipeline_model_parallel_size == stages
    assert (args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers) == (first, last)


@pytest.mark.parametrize(
    ("layers", "processes", "split"),
    [(92, 16, (16, 2)), (47, 8, (8, 5)), (4, 1, (1, None)), (9, 8, (2, 4)), (8, 8, (8, 1)), (61, 32, (16, 1))],
)
def test_layers_are_split_over_pipeline_stages(layers, processes, split):
    assert pipeline_split(layers, processes) == split


@pytest.mark.parametrize("config", [{"compression_config": {}}, {"text_config": {"quantization_config": {}, "a": 1}}])
def test_the_config_of_plain_weights_says_no_quantization_wherever_it_stood(tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "m"} | config))
    _drop_quantization(tmp_path)
    left = {"text_config": {"a": 1}} if "text_config" in config else {}
    assert json.loads((tmp_path / "config.json").read_text()) == {"model_type": "m"} | left


@pytest.mark.parametrize("missing", ["--hf-checkpoint", "--save"])
def test_what_a_conversion_needs_is_named(tmp_path, missing):
    (tmp_path / "config.json").write_text("{}")
    argv = ["--hf-checkpoint", str(tmp_path), "--save", str(tmp_path / "dist")]
    argv[argv.index(missing) : argv.index(missing) + 2] = []
    with pytest.raises(ConfigError, match=f"{missing} is missing"):
        parse(argv)
