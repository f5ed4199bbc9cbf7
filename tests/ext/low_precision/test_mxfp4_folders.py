"""A folder of gpt-oss in MXFP4 and its bf16 copy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from slime.ext.low_precision.folders.run import rewrite_folder
from slime.ext.low_precision.folders.to_bf16 import Mxfp4ToBf16
from slime.utils.errors import ConfigError, DataError
from tests.unit.weights.quantize.test_mxfp4 import GATE_UP, packed, write_folder


def test_the_bf16_copy_has_the_same_numbers_and_no_trace_of_mxfp4(tmp_path: Path) -> None:
    target = tmp_path / "bf16"
    rewrite_folder(Mxfp4ToBf16(), write_folder(tmp_path / "mxfp4"), target)
    tensors = {name: tensor for file in target.glob("*.safetensors") for name, tensor in load_file(file).items()}
    assert set(tensors) == {GATE_UP, f"{GATE_UP}_bias", "model.norm.weight"}
    assert torch.equal(tensors[GATE_UP], convert_moe_packed_tensors(*packed()))
    assert json.loads((target / "config.json").read_text()) == {"dtype": "bfloat16", "model_type": "gpt_oss"}


@pytest.mark.parametrize("missing", ["blocks", "scales"])
def test_blocks_and_scales_need_each_other(tmp_path: Path, missing: str) -> None:
    folder = write_folder(tmp_path / "mxfp4")
    file = folder / "model.safetensors"
    left = {name: tensor for name, tensor in load_file(file).items() if not name.endswith(missing)}
    save_file(left, file)
    with pytest.raises((DataError, ConfigError), match="_blocks"):
        rewrite_folder(Mxfp4ToBf16(), folder, tmp_path / "bf16")
