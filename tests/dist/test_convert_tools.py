"""The command-line converters: Hugging Face to torch_dist and back gives every tensor bit for bit."""

import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.dist.trainer_case import run_workers
from tests.matrix.case import load_cases, read_config
from tests.unit.backends.megatron_utils.megatron_case import hf_flags, write_hf_model
from tests.contracts.source_tree import REPO

pytestmark = pytest.mark.dist


def run_tool(name: str, *flags: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, REPO / "tools" / name, *map(str, flags)], capture_output=True, text=True, timeout=110
    )


def tensors_of(folder: Path) -> dict:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def test_there_and_back_gives_every_tensor_bit_for_bit(tmp_path, monkeypatch):
    write_hf_model(tmp_path / "hf", "qwen3")
    monkeypatch.setenv("OPEN_TRAINING_INT4_FAKE_QAT_FLAG", "1")  # affects only training, as do adapters
    there = ("--hf-checkpoint", tmp_path / "hf", "--save", tmp_path / "dist", "--lora-rank", 4)
    done = run_tool("convert_hf_to_torch_dist.py", *there)
    assert done.returncode == 0, done.stderr
    assert "model flags follow from" in done.stderr
    assert (tmp_path / "dist" / "latest_checkpointed_iteration.txt").read_text() == "release"
    back = ("--input-dir", tmp_path / "dist" / "release", "--output-dir", tmp_path / "back")
    done = run_tool("convert_torch_dist_to_hf.py", *back, "--origin-hf-dir", tmp_path / "hf")
    assert done.returncode == 0, done.stderr
    before, after = tensors_of(tmp_path / "hf"), tensors_of(tmp_path / "back")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype
        assert after[name].equal(tensor), name
    done = run_tool("convert_torch_dist_to_hf_parallel.py", *back, "--origin-hf-dir", tmp_path / "hf")
    assert done.returncode == 2 and "pass -f to write over it" in done.stderr
    small = ("--chunk-size", 20000, "--load-max-workers", 3, "--save-max-workers", 2)
    done = run_tool("convert_torch_dist_to_hf_parallel.py", *back, "-f", "--model-name", "qwen3", *small)
    assert done.returncode == 0, done.stderr
    again = tensors_of(tmp_path / "back")
    assert all(again[name].equal(tensor) for name, tensor in before.items()) and len(again) == len(before)
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 4
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == before.keys()


@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen3_vl_moe"])
def test_a_head_of_which_the_top_of_config_json_decides_comes_back(tmp_path, kind):
    source = tmp_path / "hf"
    case = load_cases([kind])[kind]
    case.write_checkpoint(source)
    config = read_config(source)
    config |= {"tie_word_embeddings": False, "text_config": config["text_config"] | {"tie_word_embeddings": True}}
    (source / "config.json").write_text(json.dumps(config))
    before = tensors_of(source)
    before["lm_head.weight"] = torch.rand_like(before["model.language_model.embed_tokens.weight"])
    save_file(before, source / "model.safetensors")
    done = run_tool("convert_hf_to_torch_dist.py", "--hf-checkpoint", source, "--save", tmp_path / "dist")
    assert done.returncode == 0, done.stderr
    back = ("--input-dir", tmp_path / "dist" / "release", "--output-dir", tmp_path / "back", "--origin-hf-dir", source)
    done = run_tool("convert_torch_dist_to_hf.py", *back)
    assert done.returncode == 0, done.stderr
    after = tensors_of(tmp_path / "back")
    assert after.keys() == before.keys() and after["lm_head.weight"].equal(before["lm_head.weight"])
    (source / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    done = run_tool("convert_torch_dist_to_hf.py", *back, "-f")
    assert done.returncode == 2 and "tie_word_embeddings True; the checkpoint" in done.stderr


def bytes_in_memory(rank: int, world_size: int, port: int, folder: str) -> list[int]:
    """Convert; return the bytes that each tensor still has when the checkpoint is written."""
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    from tools import convert_hf_to_torch_dist
    from tools.streamed_conversion import _Weights

    given, read = [], _Weights.read

    def kept(weights: _Weights, view: object) -> object:
        given.append(read(weights, view))
        return given[-1]

    _Weights.read = kept
    flags = ("--hf-checkpoint", f"{folder}/hf", "--save", f"{folder}/dist")
    convert_hf_to_torch_dist.convert(convert_hf_to_torch_dist.parse([*flags]))
    return [tensor.untyped_storage().nbytes() for tensor in given]


def test_a_tensor_takes_no_memory_once_it_is_written(tmp_path):
    """torch's writer keeps a copy of each tensor until its file is complete."""
    write_hf_model(tmp_path / "hf", "qwen3")
    [sizes] = run_workers(bytes_in_memory, 1, str(tmp_path))
    assert len(sizes) > 20
    assert not any(sizes[:-1])


def test_flags_that_disagree_with_the_model_are_all_named(tmp_path):
    write_hf_model(tmp_path / "hf", "qwen3")
    flags = [*hf_flags(tmp_path / "hf"), "--num-layers", "4", "--ffn-hidden-size", "96"]
    done = run_tool("convert_hf_to_torch_dist.py", *flags, "--save", tmp_path / "dist")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "--num-layers" in done.stderr and "--ffn-hidden-size" in done.stderr


EXPERTS = "--expert-model-parallel-size 2"
LAYOUTS = ("", EXPERTS, f"--tensor-model-parallel-size 2 --expert-tensor-parallel-size 1 {EXPERTS}")


def convert_with_two_processes(rank: int, world_size: int, port: int, folder: str) -> list[int]:
    """Convert under each layout, and export the last result through the model; return the pipeline sizes."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1")
    from tests.matrix.case import load_cases
    from tests.matrix.parity import leave_world
    from tools import convert_hf_to_torch_dist, convert_to_hf

    source = Path(folder) / "hf"
    flags = load_cases(["glm4_moe"])["glm4_moe"].flags(source)
    sizes = []
    for number, layout in enumerate(LAYOUTS):
        os.environ["MASTER_PORT"] = str(port + number)
        argv = [*flags, *layout.split(), "--hf-checkpoint", source, "--save", Path(folder) / f"dist{number}"]
        args = convert_hf_to_torch_dist.parse([str(word) for word in argv])
        convert_hf_to_torch_dist.convert(args)
        sizes.append(convert_hf_to_torch_dist.with_layout(args, world_size).pipeline_model_parallel_size)
        leave_world()
    os.environ["MASTER_PORT"] = str(port + len(LAYOUTS))
    argv = [*flags, *EXPERTS.split(), "--hf-checkpoint", source, "--load", Path(folder) / "dist0"]
    convert_to_hf.convert(
        convert_to_hf.parse([str(word) for word in [*argv, "--output-dir", Path(folder) / "export"]])
    )
    leave_world()
    return sizes


def test_two_processes_convert_under_every_kind_of_layout(tmp_path, monkeypatch):
    from tests.matrix.case import load_cases, read_tensors, write_bf16_copy
    from tests.matrix.comparisons import differing_tensors
    from tools import convert_torch_dist_to_hf

    monkeypatch.setenv("OPEN_TRAINING_INT4_FAKE_QAT_FLAG", "1")  # the groups do not fit these experts
    load_cases(["glm4_moe"])["glm4_moe"].write_checkpoint(tmp_path / "fp32")
    write_bf16_copy(tmp_path / "fp32", tmp_path / "hf")
    expected = read_tensors(tmp_path / "hf")
    # No flag says how to split: one pipeline stage per process.
    assert run_workers(convert_with_two_processes, 2, str(tmp_path)) == [[2, 1, 1]] * 2
    for number in range(len(LAYOUTS)):
        back = tmp_path / f"back{number}"
        argv = [
            "--input-dir",
            tmp_path / f"dist{number}/release",
            "--output-dir",
            back,
            "--origin-hf-dir",
            tmp_path / "hf",
        ]
        convert_torch_dist_to_hf.convert(convert_torch_dist_to_hf.parse([str(word) for word in argv]))
        assert differing_tensors(read_tensors(back), expected) == []
    assert differing_tensors(read_tensors(tmp_path / "export"), expected) == []


def test_a_tensor_that_the_checkpoint_lacks_is_named_or_taken_from_the_origin(tmp_path, caplog):
    import torch
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import save_file

    from tools.convert_torch_dist_to_hf import convert, parse

    write_hf_model(tmp_path / "hf", "llama3")
    extra = torch.randn(3).half()
    save_file({"vision.weight": extra}, tmp_path / "hf" / "extra.safetensors")
    norm = torch.randn(32)
    tensors = {"decoder.final_layernorm.weight": norm}
    dcp.save(tensors, storage_writer=dcp.FileSystemWriter(tmp_path / "iter_0000001"), no_dist=True)
    sizes = {"num_layers": 3, "num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 8, "hidden_size": 32}
    args = Namespace(
        **sizes,
        group_query_attention=True,
        vocab_size=131,
        padded_vocab_size=136,
        untie_embeddings_and_output_weights=True,
        num_experts=None,
        mtp_num_layers=None,
    )
    torch.save({"args": args}, tmp_path / "iter_0000001" / "common.pt")
    argv = [
        "--input-dir",
        tmp_path / "iter_0000001",
        "--output-dir",
        tmp_path / "out",
        "--origin-hf-dir",
        tmp_path / "hf",
    ]
    argv = [str(word) for word in argv]
    convert(parse(argv))
    assert "pass -a to copy them" in caplog.text
    assert tensors_of(tmp_path / "out").keys() == {"model.norm.weight"}
    convert(parse([*argv, "-a", "-f"]))
    completed = tensors_of(tmp_path / "out")
    assert completed["vision.weight"].equal(extra) and completed["model.norm.weight"].equal(norm)
    assert len(completed) > 20
