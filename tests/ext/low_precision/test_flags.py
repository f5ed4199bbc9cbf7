"""Flags and variables of int4 quantization-aware training, against each other and against the checkpoint."""

from __future__ import annotations

import json
import logging
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from slime.ext.low_precision.folders.run import rewrite_folder
from slime.ext.low_precision.folders.to_quantized import to_int4
from slime.ext.low_precision.selection import Int4Selection, group_size
from slime.utils.errors import ConfigError
from tests.unit.backends.megatron_utils.megatron_case import parse

SIZES = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --kv-channels 32 --vocab-size 100 --swiglu"
DENSE = [*SIZES.split(), "--ffn-hidden-size", "128"]
MOE = [*DENSE, *"--num-experts 4 --moe-ffn-hidden-size 96 --disable-bias-linear --moe-layer-freq [0,1]".split()]
EXPERT, MLP, HEAD = (
    "model.layers.1.mlp.experts.3.up_proj.weight",
    "model.layers.0.mlp.up_proj.weight",
    "lm_head.weight",
)


def packed_folder(folder: Path, names: tuple[str, ...], *, group_size: int = 32, symmetric: bool = True) -> Path:
    """A checkpoint with these matrices, packed where our converter packs."""
    plain = folder / "plain"
    plain.mkdir()
    save_file({name: torch.ones(8, 64) for name in names}, plain / "model.safetensors")
    (plain / "config.json").write_text(json.dumps({"model_type": "acme", "dtype": "bfloat16"}))
    rewrite_folder(to_int4(group_size, symmetric), plain, folder / "int4")
    return folder / "int4"


def test_the_variables_of_the_environment_are_the_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    args = parse(*MOE)
    assert args.int4_qat is False
    monkeypatch.setenv("OPEN_TRAINING_INT4_GROUP_SIZE", "32")
    assert parse(*MOE).int4_qat is False
    monkeypatch.setenv("OPEN_TRAINING_INT4_FAKE_QAT_FLAG", "1")
    args = parse(*MOE)
    assert (args.int4_qat, args.int4_qat_group_size) == (True, 32)
    assert parse(*MOE, "--int4-qat-group-size", "96").int4_qat_group_size == 96
    monkeypatch.setenv("OPEN_TRAINING_INT4_FAKE_QAT_FLAG", "0")
    assert parse(*MOE).int4_qat is False


def test_experts_have_the_size_of_dense_layers_where_no_flag_says_another() -> None:
    words = [word for word in MOE if word not in ("--moe-ffn-hidden-size", "96")]
    assert parse(*words, "--int4-qat", "--int4-qat-group-size", "64").int4_qat
    with pytest.raises(ConfigError, match="--moe-ffn-hidden-size is 128; over --expert-tensor-parallel-size 1"):
        parse(*words, "--int4-qat", "--int4-qat-group-size", "96")


def selection_of(args: Namespace) -> Int4Selection:
    return Int4Selection(args.hf_checkpoint, args.int4_qat_group_size, rounds_dense=args.int4_qat_dense)


def test_a_packed_checkpoint_decides_what_is_rounded_and_in_which_groups(tmp_path: Path) -> None:
    folder = packed_folder(tmp_path, (EXPERT, MLP, HEAD))
    args = parse(*MOE, "--int4-qat", "--hf-checkpoint", str(folder))
    assert args.int4_qat_group_size == 32
    selection = selection_of(args)
    assert [selection.is_quantized(name) for name in (EXPERT, MLP, HEAD)] == [True, True, False]
    with pytest.raises(ConfigError, match="is 96; the groups of --hf-checkpoint .* have 32 columns"):
        parse(*MOE, "--int4-qat", "--int4-qat-group-size", "96", "--hf-checkpoint", str(folder))


def test_without_one_experts_are_rounded_and_by_a_flag_all_that_the_converter_packs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    flags = (*MOE, "--int4-qat", "--int4-qat-group-size", "32")
    names = (EXPERT, MLP, HEAD, "model.layers.0.self_attn.kv_b_proj.weight")
    assert [selection_of(parse(*flags)).is_quantized(name) for name in names] == [True, False, False, False]
    selection = selection_of(parse(*flags, "--int4-qat-dense"))
    assert [selection.is_quantized(name) for name in names] == [True, True, False, False]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([*MOE, "--int4-qat-group-size", "32"], "--int4-qat-group-size is given without --int4-qat"),
        ([*MOE, "--int4-qat-dense"], "--int4-qat-dense is given without --int4-qat"),
        (
            [*MOE, "--int4-qat", "--int4-qat-group-size", "32", "--fp8-format", "e4m3", "--fp8-recipe", "blockwise"],
            "--int4-qat and --fp8-format e4m3 are given",
        ),
        ([*MOE, "--int4-qat", "--int4-qat-group-size", "12"], "is 12; it must be a multiple of 8"),
        (
            [*MOE, "--int4-qat", "--int4-qat-group-size", "64"],
            "--moe-ffn-hidden-size is 96; over --expert-tensor-parallel-size 1 a rank has 96 columns",
        ),
        (
            [
                *(*MOE, "--int4-qat", "--int4-qat-group-size", "32", "--actor-num-gpus-per-node", "2"),
                *("--tensor-model-parallel-size", "2", "--expert-tensor-parallel-size", "2", "--sequence-parallel"),
            ],
            "over --expert-tensor-parallel-size 2 a rank has 48 columns",
        ),
        (
            [
                *(*DENSE, "--int4-qat", "--int4-qat-dense", "--actor-num-gpus-per-node", "2"),
                *("--tensor-model-parallel-size", "2", "--sequence-parallel"),
            ],
            "--num-attention-heads x --kv-channels is 128; over --tensor-model-parallel-size 2 a rank has 64 columns",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_its_numbers(flags: list[Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(*flags)


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
                "num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False}}},
        },
    ],
)  # fmt: skip
def test_a_checkpoint_quantized_in_another_way_is_refused(tmp_path: Path, quantization: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "acme", "quantization_config": quantization}))
    with pytest.raises(ConfigError, match="--int4-qat rounds to symmetric four-bit integers"):
        parse(*MOE, "--int4-qat", "--hf-checkpoint", str(tmp_path))


def test_engines_that_serve_other_weights_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    args = parse(*MOE)
    args.int4_qat_group_size, args.debug_train_only = 32, False
    with caplog.at_level(logging.WARNING):
        group_size(args.int4_qat_group_size, args.hf_checkpoint, is_served=True)
    assert "another policy" in caplog.text
