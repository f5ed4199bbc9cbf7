"""Checkpoints on disk, read parameter by parameter, whoever wrote them."""

from __future__ import annotations

import pickle
import sys
import types
from argparse import Namespace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from slime.utils.errors import DataError
from tools.torch_dist_reader import TorchDistFolder


def write(folder: Path, tensors: dict[str, torch.Tensor], args: object = None) -> Path:
    dcp.save(tensors, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    torch.save({"args": args or Namespace(num_layers=2), "iteration": 3}, folder / "common.pt")
    return folder


def test_stacked_layers_and_experts_come_one_by_one_and_what_is_no_weight_does_not(tmp_path):
    proj = torch.randn(2, 5, 3)
    experts = torch.randn(2, 3, 4, 5)
    plain = torch.randn(7)
    folder = write(
        tmp_path,
        {
            "decoder.layers.self_attention.linear_proj.weight": proj,
            "decoder.layers.mlp.experts.experts.linear_fc1.weight": experts,
            "decoder.layers.1.mlp.experts.experts.linear_fc2.weight": experts[0],
            "decoder.layers.0.mlp.experts.local_experts.2.linear_fc2.weight": plain,
            "decoder.final_layernorm.weight": plain,
            "optimizer.state.exp_avg.decoder.final_layernorm.weight": plain,
            "decoder.layers.0.mlp.linear_fc1._extra_state": plain,
        },
    )
    checkpoint = TorchDistFolder(folder)
    tensors = dict(named for part in checkpoint.slices() for named in checkpoint.read(part))
    assert checkpoint.read_args().num_layers == 2
    expected = {"decoder.final_layernorm.weight": plain, "decoder.layers.0.mlp.experts.linear_fc2.weight2": plain}
    for layer in range(2):
        expected[f"decoder.layers.{layer}.self_attention.linear_proj.weight"] = proj[layer]
        for expert in range(3):
            expected[f"decoder.layers.{layer}.mlp.experts.linear_fc1.weight{expert}"] = experts[layer, expert]
    for expert in range(3):
        expected[f"decoder.layers.1.mlp.experts.linear_fc2.weight{expert}"] = experts[0, expert]
    assert tensors.keys() == expected.keys()
    assert all(tensors[name].equal(tensor) for name, tensor in expected.items())


def test_a_piece_is_as_large_as_what_was_written_at_once_not_as_the_stack(tmp_path):
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata

    chunks = [ChunkStorageMetadata(torch.Size([layer, 0]), torch.Size([1, 6])) for layer in range(4)]
    entry = TensorStorageMetadata(TensorProperties(dtype=torch.bfloat16), torch.Size([4, 6]), chunks)
    checkpoint = TorchDistFolder(write(tmp_path, {"x": torch.zeros(1)}))
    checkpoint._metadata.state_dict_metadata = {"decoder.layers.input_layernorm.weight": entry}
    assert [(part.slice.offsets, part.slice.sizes, part.num_bytes) for part in checkpoint.slices()] == [
        ((layer, 0), (1, 6), 12) for layer in range(4)
    ]


def test_arguments_with_objects_of_other_programs_are_read_without_running_them(tmp_path, monkeypatch):
    module = types.ModuleType("megatron_of_somebody")
    exec(
        "import enum, os\n"
        "class Kind(enum.Enum):\n    A = 1\n"
        "class Bomb:\n    def __reduce__(self):\n        return (os.system, ('touch exploded',))\n",
        module.__dict__,
    )
    monkeypatch.setitem(sys.modules, "megatron_of_somebody", module)
    args = Namespace(num_layers=5, kind=module.Kind.A, bomb=module.Bomb(), dtype=torch.bfloat16)
    folder = write(tmp_path, {"x": torch.zeros(1)}, args)
    monkeypatch.delitem(sys.modules, "megatron_of_somebody")
    monkeypatch.chdir(tmp_path)
    read = TorchDistFolder(folder).read_args()
    assert (read.num_layers, read.dtype) == (5, torch.bfloat16)
    assert not (tmp_path / "exploded").exists()


def test_a_folder_whose_save_was_not_completed_says_what_is_missing(tmp_path):
    with pytest.raises(DataError, match="no common.pt"):
        TorchDistFolder(tmp_path)
    (tmp_path / "common.pt").write_bytes(pickle.dumps({}))
    with pytest.raises(DataError, match="no .metadata"):
        TorchDistFolder(tmp_path)
