"""Finding and reading tensors in safetensors files without decoding them."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from slime.utils.errors import DataError
from slime.weights.hf_files import INDEX_FILE
from slime.weights.stored_tensors import STORED_DTYPES, read_bytes, read_header, read_layout

TENSORS = {
    f"of {name}": torch.arange(6).to(getattr(torch, name)).reshape(2, 3)
    for name in STORED_DTYPES
    if name != "float8_e8m0fnu"
} | {"empty": torch.empty(0, 4), "scalar": torch.tensor(3.0)}


@pytest.fixture
def folder(tmp_path):
    names = list(TENSORS)
    for index, part in enumerate((names[:5], names[5:])):
        save_file({name: TENSORS[name] for name in part}, tmp_path / f"part-{index}.safetensors", {"note": str(index)})
    return tmp_path


def test_every_dtype_is_read_as_it_lies(folder):
    layout = read_layout(folder)
    assert set(layout) == set(TENSORS)
    for name, tensor in TENSORS.items():
        stored = layout[name]
        assert stored.shape == tuple(tensor.shape)
        assert STORED_DTYPES[str(tensor.dtype).removeprefix("torch.")] == stored.dtype
        assert read_bytes(stored).tobytes() == tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    assert read_header(folder / "part-1.safetensors")[1] == {"note": "1"}


def test_an_index_says_which_files_count(folder):
    save_file({"of int32": torch.zeros(1)}, folder / "old.safetensors")
    with pytest.raises(DataError, match="of int32 is stored twice"):
        read_layout(folder)
    weight_map = {name: "part-0.safetensors" for name in list(TENSORS)[:5]}
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    assert set(read_layout(folder)) == set(weight_map)


@pytest.mark.parametrize("keep", [0, 7, 100, -1])
def test_a_file_that_was_cut_off_is_refused(folder, keep):
    file = folder / "part-0.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(DataError, match=r"part-0\.safetensors is no whole safetensors file"):
        read_layout(folder)


@pytest.mark.parametrize("file", ["..", "", "/etc/passwd", "a/../../b.safetensors", 5, None])
def test_an_index_leads_to_no_file_elsewhere(folder, file):
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(DataError, match="index"):
        read_layout(folder)


def test_an_index_and_its_files_must_agree(folder):
    names = {name: "part-0.safetensors" for name in TENSORS}
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": names}))
    last = list(TENSORS)[-1]
    with pytest.raises(DataError, match=r"puts .* into part-0\.safetensors, and no file has it"):
        read_layout(folder)
    names |= {name: "part-1.safetensors" for name in list(TENSORS)[6:]} | {last: "part-1.safetensors"}
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": names}))
    with pytest.raises(DataError, match=r"and it is in part-1\.safetensors"):
        read_layout(folder)


def test_an_index_leaves_nothing_of_its_model_out(folder):
    names = sorted(TENSORS)
    files = {name: f"model-0000{1 + number % 2}-of-00002.safetensors" for number, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: TENSORS[name] for name in names if files[name] == file}, folder / file)
    index = folder / INDEX_FILE
    index.write_text(json.dumps({"weight_map": files}))
    assert read_layout(folder).keys() == TENSORS.keys(), "files of another name are not of this model"
    index.write_text(json.dumps({"weight_map": {name: files[name] for name in names[1:]}}))
    with pytest.raises(DataError, match=f"index.json leaves out {names[0]}, which .*model-00001-of-00002"):
        read_layout(folder)
    index.write_text(json.dumps({"weight_map": {n: file for n, file in files.items() if "00001-of" in file}}))
    with pytest.raises(DataError, match=r"index.json leaves out model-00002-of-00002\.safetensors"):
        read_layout(folder)
