"""Untrusted files, untrusted JSON, and folders of one user."""

from __future__ import annotations

import json
import math
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from slime.flags.checkpoint import check_huggingface_folder, read_tracker
from slime.observability.dumps import read_dump, save_rollout_dump
from slime.rollout.plain_values import read_state, write_state
from slime.utils import files
from slime.utils.errors import ConfigError, DataError, SlimeError
from slime.utils.files import parse_object, read_model_type, read_object, read_outside_file
from slime.weights.file_digests import FolderDigests
from slime.weights.stored_tensors import read_header, read_layout

pytestmark = pytest.mark.timeout(30)  # an endless read fails


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
    "weights": read_header,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_file_of_its_folder_is_one_error_at_once(reader, kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a socket's path must be short
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


def hub_cache(folder: Path) -> Path:
    """A model as the hub's client stores it: files are links to ``blobs``, two folders above."""
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


REFUSED = {
    "a key twice": ('{"a": 1, "b": {"c": 1, "c": 2}}', "the key 'c' twice"),
    "NaN": ('{"NaN": "NaN",\n "b": NaN}', "NaN, which JSON does not have"),
    "infinity": ('{"a": [1, -Infinity]}', "-Infinity, which"),
    "a number beyond floats": ('{"a": 1e999}', "the number 1e999"),
    "a number of 5000 digits": ('{"a": ' + "9" * 5000 + "}", "4300 digits"),
    "bytes that are no UTF-8": (b'{"a": "\xff"}', "position 7"),
    "half a surrogate pair": ('{"a": "\\ud800"}', "surrogates"),
    "depth": ('{"a":' * 100_000, "nested too deep"),
    "a list": ("[1]", "holds a list"),
    "nothing": ("", "char 0"),
    "a comma at the end": ('{"a": 1,}', "line 1"),
    "a line feed in a text": ('{"a": "\n"}', "control character"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_text_of_no_or_two_meanings_is_refused_with_its_place(name, tmp_path):
    text, says = REFUSED[name]
    path = tmp_path / "config.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=rf"--x: .*config\.json is not JSON.*{says}.*again\.") as caught:
        read_object(path, flag="--x", error=ConfigError)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
    assert caught.value.__cause__ is not None
    with pytest.raises(DataError):
        read_object(path)


def test_what_has_one_meaning_is_what_json_says():
    assert parse_object('{"a": [0.0, Infinity]}', takes_infinity=True) == {"a": [0.0, math.inf]}
    for text in ('{"a": [1e-9, -0.0, "\\ud83d\\ude00", true, null, 1000000000000000019884624838656]}', "{}"):
        assert parse_object(text) == parse_object(text.encode()) == json.loads(text)


def test_a_config_without_a_model_type_and_no_config_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json does not exist"):
        read_model_type(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": null}')
    with pytest.raises(ConfigError, match="has no model_type"):
        read_model_type(tmp_path)


@pytest.fixture
def temp(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    return tmp_path


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_all_processes_of_a_user_share_one_folder_that_nobody_else_enters(temp):
    mine = temp / f"slime-{os.getuid()}"
    assert files.user_folder() == files.user_folder() == mine and mode_of(mine) == 0o700
    mine.chmod(0o775)  # mode of earlier versions
    assert mode_of(files.user_folder()) == 0o700


def test_a_link_or_a_file_in_the_place_of_the_folder_is_refused_and_left_alone(temp):
    target, mine = temp / "target", temp / f"slime-{os.getuid()}"
    target.mkdir(mode=0o755)
    for put in (lambda: mine.symlink_to(target), lambda: mine.symlink_to(temp / "nothing"), mine.touch):
        put()
        with pytest.raises(ConfigError, match=r"slime-\d+ is (a link|no folder).*TMPDIR"):
            files.user_folder()
        mine.unlink()
    assert mode_of(target) == 0o755 and not (temp / "nothing").exists()


def test_the_folder_of_ray_is_open_to_others_only_below_one_that_is_not(temp):
    temp = temp if len(str(temp)) < 18 else Path(tempfile.mkdtemp(dir="/tmp"))
    tempfile.tempdir = str(temp)
    folder = files.new_ray_folder()
    assert folder.parent == temp and mode_of(folder) == 0o700 and not (folder / "ray").is_symlink()
    assert files.new_ray_folder() != folder
    for made in (*temp.iterdir(),):
        files.remove_ray_folder(made)
    temp.rmdir()


def test_where_the_path_is_too_long_for_sockets_they_have_a_short_one_and_the_files_stay(temp, monkeypatch):
    long = temp / ("long" * 10)
    long.mkdir()
    monkeypatch.setenv("RAY_TMPDIR", str(long))
    folder = files.new_ray_folder()
    assert folder.parent == Path("/tmp") and mode_of(folder) == 0o700
    [behind] = long.iterdir()
    assert (folder / "ray").resolve() == behind.resolve() and mode_of(behind) == 0o700
    session = folder / "ray/session_2026-11-28_16-56-05_123456_1234567/sockets"
    session.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(session / "plasma_store.1"))
    files.remove_ray_folder(folder)
    assert list(long.iterdir()) == [] and not folder.exists()


def test_a_missing_path_names_a_neighbour_of_a_similar_name(tmp_path):
    (tmp_path / "prompts.jsonl").touch()
    assert files.similar_path(tmp_path / "prompt.jsonl") == f" Did you mean {tmp_path}/prompts.jsonl?"
    assert files.similar_path(tmp_path / "weights") == files.similar_path(tmp_path / "no" / "folder") == ""
