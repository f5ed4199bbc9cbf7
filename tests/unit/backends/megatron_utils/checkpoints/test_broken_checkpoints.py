"""Damaged and malicious checkpoint folders, in the trainer and in the converter."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import shutil
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.utils import unwrap_model
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from slime.backends.megatron_utils.checkpoint import load_checkpoint, save_checkpoint
from slime.backends.megatron_utils.hf_checkpoint_saver import save_hf_model_to_path
from slime.backends.megatron_utils.model import build_model
from slime.flags.files import check_contents
from slime.utils.errors import ConfigError, DataError
from slime.weights.file_digests import DIGEST_FILE
from tests.unit.backends.megatron_utils.megatron_case import hf_flags, parse, start_single_process, write_hf_model
from tools.torch_dist_reader import TorchDistFolder


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> tuple[Namespace, Any]:
    folder = tmp_path_factory.mktemp("broken")
    write_hf_model(folder / "hf", "qwen3", tie_word_embeddings=False)
    args = parse(*hf_flags(folder / "hf"), "--load", str(folder / "run"))
    args.save = str(folder / "run")
    start_single_process(args)
    model = build_model(args, wrap_with_ddp=False)
    with torch.no_grad():
        for parameter in unwrap_model(model)[0].parameters():
            parameter.add_(torch.randn_like(parameter))
    save_checkpoint(args, 3, model, None, None)
    return args, model


@pytest.fixture
def folder(good, tmp_path) -> Path:
    return Path(shutil.copytree(Path(good[0].save) / "iter_0000003", tmp_path / "iter_0000003"))


def in_the_trainer(good: tuple[Namespace, Any], folder: Path, **changes: Any) -> dict[str, torch.Tensor]:
    args = Namespace(**{**vars(good[0]), "load": str(folder), **changes})
    start_single_process(args)
    model = build_model(args, wrap_with_ddp=False)
    load_checkpoint(args, model)
    return {name: value for name, value in unwrap_model(model)[0].state_dict().items() if torch.is_tensor(value)}


def in_the_converter(good: tuple[Namespace, Any], folder: Path, **changes: Any) -> dict[str, torch.Tensor]:
    checkpoint = TorchDistFolder(folder, verify=changes.get("verify_checkpoint", True))
    assert checkpoint.read_args().num_layers == good[0].num_layers
    return dict(named for part in checkpoint.slices() for named in checkpoint.read(part))


READERS = pytest.mark.parametrize("read", [in_the_trainer, in_the_converter])


def error_of(read: Callable[..., Any], good: tuple[Namespace, Any], folder: Path) -> str:
    with pytest.raises(DataError) as raised:
        read(good, folder)
    message = str(raised.value)
    assert "\n" not in message and "Traceback" not in message and message.count(str(folder)) >= 1
    return message


@READERS
@pytest.mark.parametrize("has_digests", [True, False], ids=["with digests", "of upstream"])
def test_a_whole_checkpoint_is_read_with_digests_and_without(read, has_digests, good, folder):
    if not has_digests:
        (folder / DIGEST_FILE).unlink()
    expected = {name: value for name, value in unwrap_model(good[1])[0].state_dict().items() if torch.is_tensor(value)}
    read_back = read(good, folder)
    shared = [name for name in read_back if name in expected]  # a fused norm has another name on disk
    assert len(shared) > 10 and all(torch.equal(read_back[name], expected[name]) for name in shared)


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.distcp"))


def damage(path: Path, kind: str) -> None:
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    if kind == "flipped":
        data[middle] ^= 1
    elif kind == "cut":
        del data[middle:]
    elif kind == "a byte short":
        del data[-1:]
    elif kind == "foreign":
        data[:] = b"#!/bin/sh\n" * (len(data) // 10 + 1)
    path.unlink()
    if kind != "missing":
        path.write_bytes(data)


@READERS
@pytest.mark.parametrize("kind", ["flipped", "cut", "missing"])
def test_a_damaged_shard_is_named(read, kind, good, folder):
    path = shards(folder)[1]
    damage(path, kind)
    message = error_of(read, good, folder)
    assert path.name in message
    assert kind != "flipped" or "decoder." in message or "embedding" in message


@READERS
@pytest.mark.parametrize("has_digests", [True, False], ids=["with digests", "of upstream"])
@pytest.mark.parametrize("kind", ["cut", "foreign"])
@pytest.mark.parametrize("name", ["common.pt", ".metadata"])
def test_a_damaged_file_about_the_checkpoint_is_named(read, name, kind, has_digests, good, folder):
    if not has_digests:
        (folder / DIGEST_FILE).unlink()
    damage(folder / name, kind)
    assert name in error_of(read, good, folder)


def files_of_a_start(good: tuple[Namespace, Any], folder: Path, hf: Path) -> None:
    """The driver's checks before it asks for GPUs."""
    flags = {"load": str(folder), "ref_load": None, "ckpt_step": None, "critic_args": None, "debug_train_only": False}
    check_contents(Namespace(**{**vars(good[0]), **flags, "hf_checkpoint": str(hf)}))


@pytest.mark.parametrize("has_digests", [True, False], ids=["with digests", "of upstream"])
@pytest.mark.parametrize("kind", ["missing", "a byte short"])
def test_a_start_finds_what_lacks_bytes_without_reading_a_weight(kind, has_digests, good, folder, tmp_path):
    save_hf_model_to_path(good[0], tmp_path / "hf", good[1])
    if not has_digests:
        (folder / DIGEST_FILE).unlink()
        (tmp_path / "hf" / DIGEST_FILE).unlink()
    files_of_a_start(good, folder, tmp_path / "hf")
    of_checkpoint = [*shards(folder), *(folder / name for name in ("common.pt", ".metadata", "metadata.json"))]
    for path in (*of_checkpoint, next((tmp_path / "hf").glob("*.safetensors"))):
        kept = path.read_bytes()
        damage(path, kind)
        with pytest.raises(DataError, match=f"--(load|hf-checkpoint).*{re.escape(path.name)}"):
            files_of_a_start(good, folder, tmp_path / "hf")
        path.write_bytes(kept)
    files_of_a_start(good, folder, tmp_path / "hf")


@pytest.mark.parametrize(
    "content", ['{"sharded_backend": "zarr"}', "[1]", '{"sharded_backend": "torch_dist", "more": 1}']
)
def test_another_format_is_refused(content, good, folder):
    (folder / DIGEST_FILE).unlink()
    (folder / "metadata.json").write_text(content)
    assert "metadata.json" in error_of(in_the_trainer, good, folder)


@READERS
def test_digests_that_are_damaged_themselves_are_named(read, good, folder):
    content = json.loads((folder / DIGEST_FILE).read_text())
    content["files"]["common.pt"][0][2] = "0" * 16
    (folder / DIGEST_FILE).write_text(json.dumps(content))
    assert DIGEST_FILE in error_of(read, good, folder)


@READERS
def test_damage_is_read_on_request(read, good, folder):
    path = shards(folder)[0]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert len(read(good, folder, verify_checkpoint=False)) > 10


# Malicious pickles


class Calls:
    """Pickles as a call of ``function``."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def two_steps(mark: Path) -> bytes:
    """A pickle that reaches ``os.system`` as an attribute of pathlib."""
    command = f"touch {mark}".encode()
    return b"\x80\x04\x8c\x07pathlib\x8c\x09os.system\x93\x8c" + bytes([len(command)]) + command + b"\x85R."


@READERS
def test_metadata_that_calls_a_function_is_read_without_calling_it(read, good, folder, tmp_path):
    mark = tmp_path / "ran"
    (folder / DIGEST_FILE).unlink()
    (folder / ".metadata").write_bytes(two_steps(mark))
    assert ".metadata" in error_of(read, good, folder)
    metadata = TorchDistFolder(Path(good[0].save) / "iter_0000003")._metadata
    metadata.planner_data = Calls(os.system, f"touch {mark}")
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    read(good, folder)  # the necessary files are there
    assert not mark.exists()


def test_an_object_of_a_shard_that_calls_a_function_is_refused(good, folder, tmp_path):
    mark = tmp_path / "ran"
    (folder / DIGEST_FILE).unlink()
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    file = io.BytesIO()
    torch.save([Calls(os.system, f"touch {mark}")], file)
    (index,) = [index for index in metadata.storage_data if index.fqn.startswith("rng_state")]
    metadata.storage_data[index] = type(metadata.storage_data[index])("__9_9.distcp", 0, len(file.getvalue()))
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    (folder / "__9_9.distcp").write_bytes(file.getvalue())
    message = error_of(in_the_trainer, good, folder)
    assert "rng_state" in message and "__9_9.distcp" in message and "could run code" in message
    assert not mark.exists()


@READERS
@pytest.mark.parametrize("name", ["../elsewhere.distcp", "/etc/hostname", ""])
def test_a_shard_outside_of_the_folder_is_refused(read, name, good, folder):
    (folder / DIGEST_FILE).unlink()
    shutil.copy(shards(folder)[0], folder.parent / "elsewhere.distcp")
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for index, place in list(metadata.storage_data.items()):
        metadata.storage_data[index] = type(place)(name, place.offset, place.length)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    message = error_of(read, good, folder)
    assert repr(name) in message and ".metadata" in message


def test_a_tensor_that_is_missing_or_misshapen_is_named(good, folder):
    (folder / DIGEST_FILE).unlink()
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    name = "decoder.final_layernorm.weight"
    entry = metadata.state_dict_metadata[name]
    entry.size = torch.Size([7])
    entry.chunks = [ChunkStorageMetadata(torch.Size([0]), torch.Size([7]))]
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(DataError, match=rf"{name} is \[7\] in the checkpoint"):
        in_the_trainer(good, folder)
    del metadata.state_dict_metadata[name]
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(DataError, match=f"{name} is not in the checkpoint"):
        in_the_trainer(good, folder)


# The converter


def convert(good: tuple[Namespace, Any], folder: Path, target: Path, *flags: str) -> Path:
    from tools.convert_torch_dist_to_hf import convert, parse

    origin = Path(good[0].load).parent / "hf"
    return convert(
        parse(["--input-dir", str(folder), "--output-dir", str(target), "--origin-hf-dir", str(origin), *flags])
    )


@pytest.mark.parametrize("rows", [130, 132, 100_000])
def test_a_vocabulary_that_the_copied_config_does_not_have_is_refused(rows, good, folder, tmp_path):
    with pytest.raises(ConfigError, match=rf"--vocab-size {rows}: .*config.json, which is copied, says 131"):
        convert(good, folder, tmp_path / "back", "--vocab-size", str(rows))
    assert convert(good, folder, tmp_path / "back", "--vocab-size", "131").is_dir()


def test_a_weight_that_is_not_finite_is_not_converted(good, tmp_path):
    args, model = good
    weight = next(p for n, p in unwrap_model(model)[0].named_parameters() if n.endswith("linear_proj.weight"))
    with torch.no_grad():
        before = weight[1, 2].clone()
        weight[1, 2] = float("nan")
        broken = save_checkpoint(Namespace(**{**vars(args), "save": str(tmp_path)}), 9, model, None, None)
        weight[1, 2] = before
    with pytest.raises(DataError, match=r"linear_proj\.weight is nan at \[1, 2\], one of 1 such"):
        convert(good, broken, tmp_path / "back")
    assert not (tmp_path / "back/model.safetensors.index.json").exists()
