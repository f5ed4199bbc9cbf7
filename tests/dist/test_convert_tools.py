"""The command-line converters: Hugging Face to torch_dist and back gives every tensor bit for bit."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.unit.backends.megatron_utils.megatron_case import hf_flags, write_hf_model
from tools.convert_hf_to_torch_dist import pipeline_split

pytestmark = pytest.mark.dist
REPO = Path(__file__).resolve().parents[2]


def run_tool(name: str, *flags: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, REPO / "tools" / name, *map(str, flags)], capture_output=True, text=True, timeout=110
    )


def tensors_of(folder: Path) -> dict:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def test_there_and_back_gives_every_tensor_bit_for_bit(tmp_path):
    write_hf_model(tmp_path / "hf", "qwen3")
    done = run_tool("convert_hf_to_torch_dist.py", *hf_flags(tmp_path / "hf"), "--save", tmp_path / "dist")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "dist" / "latest_checkpointed_iteration.txt").read_text() == "release"
    back = ("--input-dir", tmp_path / "dist" / "release", "--output-dir", tmp_path / "back")
    done = run_tool("convert_torch_dist_to_hf.py", *back, "--origin-hf-dir", tmp_path / "hf")
    assert done.returncode == 0, done.stderr
    before, after = tensors_of(tmp_path / "hf"), tensors_of(tmp_path / "back")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype
        assert after[name].equal(tensor), name
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == before.keys()


def test_flags_that_disagree_with_the_model_are_all_named(tmp_path):
    write_hf_model(tmp_path / "hf", "qwen3")
    flags = [*hf_flags(tmp_path / "hf"), "--num-layers", "4", "--ffn-hidden-size", "96"]
    done = run_tool("convert_hf_to_torch_dist.py", *flags, "--save", tmp_path / "dist")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "--num-layers" in done.stderr and "--ffn-hidden-size" in done.stderr


@pytest.mark.parametrize(
    ("layers", "processes", "split"),
    [(92, 16, (16, 2)), (47, 8, (8, 5)), (4, 1, (1, None)), (9, 8, (4, 0))],
)
def test_layers_are_split_over_pipeline_stages(layers, processes, split):
    if split[1] == 0:  # 9 layers over 8 stages: 2 each leave none for the last, so 4 stages of 3, and 0: then 2
        split = (2, 4)
    assert pipeline_split(layers, processes) == split
