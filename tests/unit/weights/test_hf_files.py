"""Writing a Hugging Face folder: shards, index, assets, refusals."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from slime.utils.errors import ConfigError, DataError
from slime.weights.file_digests import DIGEST_FILE
from slime.weights.hf_files import INDEX_FILE, HfFolderWriter
from slime.weights.stored_tensors import read_layout


@pytest.fixture
def origin(tmp_path):
    folder = tmp_path / "origin"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def test_tensors_are_split_into_numbered_shards_that_the_index_names(tmp_path, origin):
    writer = HfFolderWriter(tmp_path / "out", assets_from=origin, shard_bytes=40)
    for name in "abc":
        writer.add(name, torch.full((6,), float(ord(name))))  # 24 bytes each: one and a bit fit a shard
    folder = writer.close()
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 72
    assert index["weight_map"] == {name: f"model-0000{i}-of-00003.safetensors" for i, name in enumerate("abc", 1)}
    for name, file in index["weight_map"].items():
        assert load_file(folder / file)[name].tolist() == [float(ord(name))] * 6
    assert (folder / "config.json").exists()
    assert not (folder / "model.safetensors").exists()  # the source's weights are not assets


def test_weights_of_an_older_model_in_the_folder_are_removed(tmp_path, origin):
    out = tmp_path / "out"
    out.mkdir()
    (out / "model-00001-of-00009.safetensors").write_bytes(b"old")
    writer = HfFolderWriter(out, assets_from=origin)
    writer.add("a", torch.zeros(1))
    writer.close()
    assert sorted(path.name for path in out.glob("*.safetensors")) == ["model-00001-of-00001.safetensors"]


def test_a_folder_whose_writer_was_killed_is_no_model_and_its_next_writer_clears_it(tmp_path, origin):
    out = tmp_path / "out"
    killed = HfFolderWriter(out, assets_from=origin, shard_bytes=4)
    for name in "abc":
        killed.add(name, torch.zeros(1))
    with pytest.raises(DataError, match="no safetensors"):
        read_layout(out)
    with HfFolderWriter(out, assets_from=origin) as writer:
        writer.add("a", torch.zeros(1))
    names = {"config.json", DIGEST_FILE, INDEX_FILE, "model-00001-of-00001.safetensors"}
    assert {path.name for path in out.iterdir()} == names


def test_writing_over_the_source_is_refused(origin):
    with pytest.raises(ConfigError, match="over its own source"):
        HfFolderWriter(origin, assets_from=origin)


def test_every_file_of_an_export_is_on_disk_before_its_index_has_a_name(tmp_path, monkeypatch, origin):
    synced: list[str] = []
    fsync, replace = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda file: (synced.append(os.readlink(f"/proc/self/fd/{file}")), fsync(file)))
    missing: list[str] = []

    def checked(self, target):
        if Path(target).name == INDEX_FILE:
            missing.extend(path.name for path in tmp_path.glob("new/*") if name_of(path) not in map(name_of, synced))
        return replace(self, target)

    def name_of(path):
        return os.path.basename(path).removesuffix(".tmp")

    monkeypatch.setattr(Path, "replace", checked)
    with HfFolderWriter(tmp_path / "new", assets_from=origin) as writer:
        writer.add("a", torch.ones(3))
    assert missing == [] and {"config.json", INDEX_FILE, "new"} <= set(map(name_of, synced))


@pytest.mark.parametrize("name", [DIGEST_FILE, INDEX_FILE])
def test_what_cannot_be_written_at_the_end_names_the_flag_of_the_folder(tmp_path, name):
    with pytest.raises(DataError, match="choose another folder with --save-hf;"):
        with HfFolderWriter(tmp_path, assets_from=None) as writer:
            writer.add("weight", torch.zeros(2))
            (tmp_path / f"{name}.tmp").mkdir()
