"""Links out of a folder, pipes, devices, sockets and files with holes in the place of files that others wrote."""

from __future__ import annotations

import os
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from slime.backends.megatron_utils.checkpoints.checkpoint_reader import CheckpointReader
from slime.flags.checkpoint import check_huggingface_folder, inspect_checkpoint, read_tracker, version_before
from slime.observability.dumps import load_train_dump, read_dump, save_rollout_dump
from slime.rollout.plain_values import read_state, write_state
from slime.utils.errors import DataError, SlimeError
from slime.utils.json_file import read_object
from slime.utils.outside_file import MAX_TEXT_BYTES, read_outside_file
from slime.weights.file_digests import FolderDigests
from slime.weights.stored_tensors import read_header, read_layout


@pytest.fixture(autouse=True)
def deadline() -> Iterator[None]:
    """A read that has no end fails."""
    before = signal.signal(signal.SIGALRM, lambda *unused: pytest.fail("it hangs"))
    signal.alarm(30)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def link_outside(path: Path) -> None:
    elsewhere = path.absolute().parent.parent / "elsewhere"
    shutil.move(path, elsewhere)
    path.symlink_to(elsewhere)


def link_to_link(path: Path) -> None:
    link_outside(path)
    path.rename(path.with_name("other"))
    path.symlink_to("other")


def put(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def replace(path: Path) -> None:
        path.unlink()
        make(path)

    return replace


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


def make_hole(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 42)


KINDS = {
    "a link out of the folder": link_outside,
    "a link to such a link": link_to_link,
    "/dev/zero": put(lambda path: path.symlink_to("/dev/zero")),
    "a link to itself": put(lambda path: path.symlink_to(path.name)),
    "a broken link": put(lambda path: path.symlink_to("nothing")),
    "a pipe": put(os.mkfifo),
    "a socket": put(make_socket),
    "a folder": put(Path.mkdir),
    "4 TiB of holes": put(make_hole),
}
READERS: dict[str, Callable[[Path], object]] = {
    "a file": read_outside_file,
    "an object": read_object,
    "a tracker": lambda path: read_tracker(path, "--load"),
    "a position": lambda path: read_state(path, what="It"),
    "a rollout dump": read_dump,
    "a train dump": load_train_dump,
    "weights": read_header,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_file_of_its_folder_is_one_error_at_once(reader, kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a socket's path is short
    path = Path("f") / "file"
    path.parent.mkdir()
    if reader == "a position":
        write_state(path, {"a": 1}, what="It")
    elif reader == "a rollout dump":
        save_rollout_dump(str(path), 1, [])
    else:
        path.write_text("{}" if reader == "an object" else "3")
    KINDS[kind](path)
    with pytest.raises(SlimeError) as told:
        READERS[reader](path)
    message = str(told.value)
    assert "file" in message and "\n" not in message and len(message) < 500
    if "link" in kind and "itself" not in kind and "broken" not in kind:
        assert "elsewhere, outside of its folder" in message


def test_a_link_inside_of_the_folder_and_a_linked_folder_are_read(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real/data").write_bytes(b"x")
    (tmp_path / "real/link").symlink_to("data")
    (tmp_path / "there").symlink_to("real")
    assert read_outside_file(tmp_path / "there/link") == b"x"
    os.link(tmp_path / "real/data", tmp_path / "real/hard")
    assert read_outside_file(tmp_path / "real/hard") == b"x"


def test_a_file_is_as_large_as_it_may_be(tmp_path):
    (tmp_path / "file").write_bytes(bytes(10))
    assert len(read_outside_file(tmp_path / "file", max_bytes=10)) == 10 < MAX_TEXT_BYTES
    with pytest.raises(DataError, match="has 10 bytes, and at most 9 are read"):
        read_outside_file(tmp_path / "file", max_bytes=9)


def hub_cache(folder: Path) -> Path:
    """A model as the hub's client keeps it: files are links to ``blobs``, two folders above."""
    snapshot, blobs = folder / "models--a--b/snapshots/0123", folder / "models--a--b/blobs"
    (snapshot / "sub").mkdir(parents=True), blobs.mkdir()
    save_file({"a": torch.ones(2)}, blobs / "w")
    (blobs / "c").write_text('{"model_type": "x"}')
    (blobs / "i").write_text('{"weight_map": {"a": "model.safetensors"}}')
    for name, blob in {"model.safetensors": "w", "config.json": "c", "model.safetensors.index.json": "i"}.items():
        (snapshot / name).symlink_to(f"../../blobs/{blob}")
    (snapshot / "sub/config.json").symlink_to("../../../blobs/c")
    return snapshot


def test_a_folder_of_the_hub_s_cache_is_read(tmp_path):
    snapshot = hub_cache(tmp_path)
    assert check_huggingface_folder(str(snapshot), "--hf-checkpoint")["model_type"] == "x"
    assert list(read_layout(snapshot)) == ["a"] and FolderDigests.read(snapshot) is None
    assert read_object(snapshot / "sub/config.json") == {"model_type": "x"}


MODEL_FILES = ("config.json", "model.safetensors.index.json", "model.safetensors", "generation_config.json",
               "tokenizer.json", "digests.json")  # fmt: skip


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (name, kind)
        for name in MODEL_FILES
        for kind in ("a link out of the folder", "/dev/zero", "a pipe", "4 TiB of holes")
    ],
)
def test_a_file_of_a_model_that_is_none_is_named(name, kind, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"a": torch.ones(2)}, folder / "model.safetensors")
    for file in {"config.json", name} - {"model.safetensors"}:
        text = '{"weight_map": {"a": "model.safetensors"}}' if "index" in file else "{}"
        (folder / file).write_text(text)
    KINDS[kind](folder / name)
    told = []
    for read in (
        lambda: check_huggingface_folder(str(folder), "--hf-checkpoint"),
        lambda: read_layout(folder),
        lambda: FolderDigests.read(folder),
    ):
        try:
            read()
        except SlimeError as error:
            told.append(str(error))
    assert told and any(name in message for message in told), told
    assert all("\n" not in message and len(message) < 800 for message in told), told


@pytest.mark.parametrize("kind", KINDS)
def test_a_tracker_or_a_note_of_the_version_that_is_no_file_is_named(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = Path("run")
    (folder / "rollout").mkdir(parents=True)
    tracker = folder / "latest_checkpointed_iteration.txt"
    tracker.write_text("3")
    KINDS[kind](tracker)
    with pytest.raises(SlimeError):
        inspect_checkpoint(str(folder), "--load")
    note = folder / "rollout/weight_version.json"
    note.write_text('{"version": 3, "rollout": 2}')
    (folder / "elsewhere").unlink(missing_ok=True)
    KINDS[kind](note)
    args = type("Args", (), {"load": str(folder), "save": None, "update_weight_start_version": 0})
    if not note.is_file():
        assert version_before(args, 5) == 5
        return
    with pytest.raises(SlimeError, match="weight_version"):
        version_before(args, 5)


def checkpoint(folder: Path) -> Path:
    folder.mkdir()
    for name in ("common.pt", ".metadata", "metadata.json", "digests.json"):
        (folder / name).write_bytes(b"{}")
    return folder


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"a folder"}))
@pytest.mark.parametrize("name", ["common.pt", ".metadata", "metadata.json", "digests.json"])
def test_a_file_of_a_checkpoint_that_is_none_is_named(name, kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = checkpoint(Path("c"))
    KINDS[kind](folder / name)
    if name == "digests.json":
        with pytest.raises(DataError, match=name):
            FolderDigests.read(folder)
        return
    reader = object.__new__(CheckpointReader)
    reader.folder, reader.digests = folder, None
    with pytest.raises(DataError, match=name):
        reader.read_file(name)
