"""The conversion commands of the documents: which process gets which layers, and that all their flags are accepted."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest

from slime.backends.megatron_utils.arguments import validate_megatron_arguments
from slime.utils.errors import ConfigError
from tests.unit.scripts.test_model_files import PUBLISHED, model_args
from tools.convert_hf_to_torch_dist import parse, pipeline_split, rendezvous, with_layout
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


def test_context_parallel_ranks_are_no_pipeline_stages(tmp_path):
    args = layout(tmp_path, "glm4-9B", 2, "--context-parallel-size 2")
    assert (args.pipeline_model_parallel_size, args.decoder_last_pipeline_num_layers) == (1, None)


def test_flags_that_mean_something_to_training_only_are_accepted(tmp_path):
    args = layout(tmp_path, "glm4-9B", 1, "--allgather-cp --padded-vocab-size 151680")
    assert args.padded_vocab_size == 151680


@pytest.mark.parametrize(
    ("layers", "processes", "split"),
    [(92, 16, (16, 2)), (47, 8, (8, 5)), (4, 1, (1, None)), (9, 8, (2, 4)), (8, 8, (8, 1)), (61, 32, (16, 1))],
)
def test_layers_are_split_over_pipeline_stages(layers, processes, split):
    assert pipeline_split(layers, processes) == split


def test_more_processes_than_layers_are_an_error():
    with pytest.raises(ConfigError, match="5 processes for 4 layers"):
        pipeline_split(4, 5)


def test_what_cannot_be_halved_any_more_is_an_error():
    with pytest.raises(ConfigError, match="--decoder-last-pipeline-num-layers"):
        pipeline_split(8, 7)


@pytest.mark.parametrize("config", [{"compression_config": {}}, {"text_config": {"quantization_config": {}, "a": 1}}])
def test_the_config_of_plain_weights_says_no_quantization_wherever_it_stood(tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "m"} | config))
    _drop_quantization(tmp_path)
    left = {"text_config": {"a": 1}} if "text_config" in config else {}
    assert json.loads((tmp_path / "config.json").read_text()) == {"model_type": "m"} | left


def test_a_job_of_slurm_needs_no_torchrun(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # so that what the tool exports ends with the test
        monkeypatch.delenv(name)
    for name, value in {"SLURM_NTASKS": "16", "SLURM_PROCID": "11", "SLURM_LOCALID": "3"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "12345")
    assert rendezvous() == (11, 16, 3)
    for port, says in (("abc", "MASTER_PORT is 'abc'; it must be a whole number"), ("70000", "at most 65535")):
        monkeypatch.setenv("MASTER_PORT", port)
        with pytest.raises(ConfigError, match=says):
            rendezvous()


@pytest.mark.parametrize("missing", ["--hf-checkpoint", "--save"])
def test_what_a_conversion_needs_is_named(tmp_path, missing):
    (tmp_path / "config.json").write_text("{}")
    argv = ["--hf-checkpoint", str(tmp_path), "--save", str(tmp_path / "dist")]
    argv[argv.index(missing) : argv.index(missing) + 2] = []
    with pytest.raises(ConfigError, match=f"{missing} is missing"):
        parse(argv)
