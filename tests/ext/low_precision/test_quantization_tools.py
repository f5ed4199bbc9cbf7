"""The conversion tools as commands: the documents' commands, their flags, and how they end."""

from __future__ import annotations

import json
import shlex
import sys

import pytest

from slime.weights.quantize import read_format
from tests.ext.low_precision.checkpoints import read_folder, tensors_of, write_folder
from tools import (
    convert_hf_to_fp8,
    convert_hf_to_int4,
    fp8_cast_bf16,
)


@pytest.fixture
def base_dir(tmp_path):
    write_folder(tmp_path / "MODEL", tensors_of("deepseek_v32", layers=2))
    return tmp_path


@pytest.fixture
def command(base_dir, monkeypatch):
    """Runs a tool as the shell would."""

    def run(tool, line):
        arguments = shlex.split(line.replace("$BASE_DIR", str(base_dir)))
        monkeypatch.setattr(sys, "argv", [tool.__name__, *arguments])
        tool.main()

    return run


def quantization_of(folder):
    return json.loads((folder / "config.json").read_text()).get("quantization_config")


def test_the_commands_of_the_seeds(base_dir, command):
    # GLM-4.5 to FP8, and DeepSeek-R1 back to bf16, with trailing slashes as in the documents.
    command(
        convert_hf_to_fp8,
        "--model-dir $BASE_DIR/MODEL/ --save-dir $BASE_DIR/MODEL-FP8/ --strategy block --block-size 128 128 "
        "--max-workers 4",
    )
    assert quantization_of(base_dir / "MODEL-FP8")["weight_block_size"] == [128, 128]
    command(fp8_cast_bf16, "--input-fp8-hf-path $BASE_DIR/MODEL-FP8 --output-bf16-hf-path $BASE_DIR/MODEL-bf16/")
    assert quantization_of(base_dir / "MODEL-bf16") is None
    assert read_folder(base_dir / "MODEL-bf16").keys() == tensors_of("deepseek_v32", layers=2).keys()


@pytest.fixture
def gptq(base_dir):
    """Options of the GPTQ tool, with eight rows of data."""
    (base_dir / "data.jsonl").write_text("".join(f'{{"text": "{"a " * n}"}}\n' for n in range(1, 9)))

    def options(*more):
        line = [f"--input-dir={base_dir}/MODEL", f"--output-dir={base_dir}/out", f"--data-dir={base_dir}/data.jsonl"]
        return convert_hf_to_int4.build_parser().parse_args([*line, "--num-calibration-samples=8", *more])

    return options


def test_gptq_is_asked_for_a_form_that_pushed_weights_can_have(gptq, base_dir):
    options = gptq("--quant-type", "W8A16", "--quant-group-size", "64", "--dampening-frac", "0.05")
    source = convert_hf_to_int4.check(options)
    arguments = convert_hf_to_int4.modifier_arguments(options, source)
    assert (arguments["dampening_frac"], arguments["actorder"]) == (0.05, None)
    assert "lm_head" in arguments["ignore"] and any("kv_b_proj" in rule for rule in arguments["ignore"])
    written = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": arguments["ignore"]}
    layout = read_format(written | {"config_groups": arguments["config_groups"]})
    assert (layout.num_bits, layout.group_size, layout.is_symmetric) == (8, 64, True)
    called = convert_hf_to_int4.oneshot_arguments(options, base_dir / "partial")
    assert called["num_calibration_samples"] == 8 and called["max_seq_length"] == 2048
    assert called["model"] == f"{base_dir}/MODEL" and called["output_dir"] == f"{base_dir}/partial"
