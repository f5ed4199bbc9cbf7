"""Model folders with digests: what the writer records, and damage that the reader reports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from slime.backends.megatron_utils.hf_to_megatron.tensors import HfTensors
from slime.utils.errors import DataError
from slime.weights.file_digests import DIGEST_FILE, FolderDigests, digest_of
from slime.weights.hf_files import HfFolderWriter
from slime.weights.stored_tensors import read_layout

TENSORS = {
    "a.weight": torch.randn(6, 4),
    "b.bias": torch.randn(5).bfloat16(),
    "scalar": torch.tensor(3.0),
    "empty": torch.zeros(0, 4),
    "layers.0.mlp.experts.gate_up_proj": torch.randn(4, 6, 8).bfloat16(),
    "layers.0.mlp.experts.down_proj": torch.randn(4, 8, 3).bfloat16(),
    "fp8": torch.randn(4, 4).to(torch.float8_e4m3fn),
}


@pytest.fixture(params=[0, 2], ids=["one thread", "two more"])
def folder(request, tmp_path) -> Path:
    with HfFolderWriter(tmp_path / "model", assets_from=None, shard_bytes=300, save_workers=request.param) as writer:
        writer.add_all(TENSORS.items())
    return tmp_path / "model"


def read_all(folder: Path, *, verify: bool = True) -> dict[str, torch.Tensor]:
    with HfTensors(folder, verify=verify) as tensors:
        return {name: tensors.get_stored(name) for name in tensors.stored_names()}


def check_digests(folder: Path) -> int:
    """Check that every byte of every file has one correct digest; return the number of files."""
    files = FolderDigests.read(folder).files
    assert set(files) == {path.name for path in folder.iterdir()} - {DIGEST_FILE}
    for name, pieces in files.items():
        data, position = (folder / name).read_bytes(), 0
        for begin, size, digest in pieces:
            assert begin == position and size > 0 and digest_of(data[begin : begin + size]) == digest
            position += size
        assert position == len(data)
    return len(files)


def test_every_byte_of_the_weights_has_a_digest(folder):
    assert check_digests(folder) > 2
    back = read_all(folder)
    assert all(torch.equal(back[name].float(), tensor.float()) for name, tensor in TENSORS.items())


def flip(path: Path, position: int, count: int = 1) -> None:
    data = bytearray(path.read_bytes())
    for index in range(position, position + count):
        data[index] = data[index] ^ 1 if count == 1 else 0
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["a.weight", "b.bias", "scalar", "fp8", "layers.0.mlp.experts.down_proj"])
def test_a_flipped_byte_is_an_error_with_file_and_tensor(name, folder):
    stored = read_layout(folder)[name]
    flip(stored.file, stored.begin + stored.num_bytes - 1)
    with pytest.raises(DataError, match=rf"{stored.file.name} is damaged: .* {name}, have the digest"):
        read_all(folder)
    assert len(read_all(folder, verify=False)) == len(TENSORS)


def test_an_expert_that_is_read_alone_is_compared_alone(folder):
    stored = read_layout(folder)["layers.0.mlp.experts.down_proj"]
    flip(stored.file, stored.begin + 2 * stored.row_bytes)
    with HfTensors(folder) as tensors:
        tensors.get("layers.0.mlp.experts.1.down_proj.weight")
    with pytest.raises(DataError, match=r"experts\.down_proj\[2\]"), HfTensors(folder) as tensors:
        tensors.get("layers.0.mlp.experts.2.down_proj.weight")


def test_damage_is_told_rather_than_what_came_of_it(folder):
    stored = read_layout(folder)["a.weight"]
    flip(stored.file, stored.begin)
    with pytest.raises(DataError, match="is damaged: .* a.weight, have the digest"), HfTensors(folder) as tensors:
        tensors.get_stored("a.weight")
        raise ZeroDivisionError


def test_a_header_that_changed_is_named(folder):
    stored = read_layout(folder)["a.weight"]
    data = stored.file.read_bytes().replace(b'"a.weight"', b'"c.weight"')
    stored.file.write_bytes(data)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["c.weight"] = index["weight_map"].pop("a.weight")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(DataError, match="the header"):
        read_all(folder)


def test_a_file_beside_the_recorded_ones_is_refused(folder):
    from safetensors.torch import save_file

    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["more"] = "more.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({"more": torch.ones(1)}, folder / "more.safetensors")
    with pytest.raises(DataError, match="more.safetensors is not among the files written"):
        read_all(folder)


def test_digests_of_a_source_are_not_copied_to_another_model(folder, tmp_path):
    (folder / "config.json").write_text("{}")
    with HfFolderWriter(tmp_path / "copy", assets_from=folder) as writer:
        writer.add("x", torch.ones(3))
    assert read_all(tmp_path / "copy").keys() == {"x"} and (tmp_path / "copy/config.json").exists()
