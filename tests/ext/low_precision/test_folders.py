"""Conversions that are shared, killed, resumed, and refused."""

import json
import os
import signal
import subprocess
import sys
from argparse import Namespace

import pytest
import torch
from safetensors import safe_open

from slime.ext.low_precision.folders import run, tensor_file
from slime.ext.low_precision.folders.plan import open_source
from slime.ext.low_precision.folders.run import rewrite_folder
from slime.ext.low_precision.folders.target import JOURNAL, LOCK
from slime.ext.low_precision.folders.to_quantized import to_fp8
from slime.utils.errors import ConfigError, DataError
from slime.weights.file_digests import DIGEST_FILE, FolderDigests, check_in_background, pieces_of_file
from tests.contracts.source_tree import REPO
from tests.ext.low_precision.checkpoints import files_of, read_folder, tensors_of, write_folder
from tests.unit.utils.test_hostile_input import FOLDERS, one_line, write_broken_folder

INDEX = "model.safetensors.index.json"


@pytest.fixture
def source(tmp_path):
    return write_folder(tmp_path / "plain", tensors_of("qwen3_moe"), shards=4)


def broken_after(monkeypatch, count, error):
    """Make the ``count``-th tensor read fail."""
    real, calls = tensor_file.read_rows, []

    def read_rows(*args, **kwargs):
        calls.append(args)
        if len(calls) == count:
            raise error
        return real(*args, **kwargs)

    monkeypatch.setattr(tensor_file, "read_rows", read_rows)


def test_any_number_of_workers_writes_the_same_files(tmp_path, source):
    for workers in (1, 2, 5):
        rewrite_folder(to_fp8(), source, tmp_path / str(workers), workers=workers)
    assert files_of(tmp_path / "1") == files_of(tmp_path / "2") == files_of(tmp_path / "5")
    names = {f"model-{shard:05d}-of-00004.safetensors" for shard in (1, 2, 3, 4)}
    assert files_of(tmp_path / "1").keys() == names | {INDEX, "config.json", "tokenizer.json", DIGEST_FILE}


KILLED = """
import os, signal, sys
from slime.ext.low_precision.folders import run, tensor_file
from slime.ext.low_precision.folders.to_quantized import to_fp8

real, calls = tensor_file.read_rows, []
def read_rows(*args, **kwargs):
    calls.append(args)
    if len(calls) == 25:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*args, **kwargs)
tensor_file.read_rows = read_rows
run.rewrite_folder(to_fp8(), sys.argv[1], sys.argv[2], workers=2)
"""


def test_a_killed_conversion_is_taken_up_and_gives_the_same_files(tmp_path, source):
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    rewrite_folder(to_fp8(), source, whole)
    process = subprocess.run([sys.executable, "-c", KILLED, source, resumed], cwd=REPO, timeout=100)
    assert process.returncode == -signal.SIGKILL
    left = files_of(resumed).keys()
    assert JOURNAL in left and any(name.endswith(".partial") for name in left)
    assert not {INDEX, "config.json"} & left
    finished = {name for name in left if name.endswith(".safetensors")}
    times = {name: (resumed / name).stat().st_mtime_ns for name in finished}
    report = rewrite_folder(to_fp8(), source, resumed, workers=2)
    assert (report.shards_found, report.shards_written) == (len(finished), 4 - len(finished)) and 0 < len(finished) < 4
    assert {name: (resumed / name).stat().st_mtime_ns for name in finished} == times
    assert files_of(resumed) == files_of(whole)


def test_the_first_error_stops_all_workers_and_leaves_nothing_half_written(tmp_path, source, monkeypatch):
    with monkeypatch.context() as patch:
        broken_after(patch, 20, OSError(5, "input/output error"))
        with pytest.raises(OSError, match="input/output error"):
            rewrite_folder(to_fp8(), source, tmp_path / "out", workers=3)
    left = files_of(tmp_path / "out").keys()
    assert JOURNAL in left and not {INDEX, "config.json", LOCK} & left
    assert not any(name.endswith(".partial") for name in left)
    rewrite_folder(to_fp8(), source, tmp_path / "out")
    rewrite_folder(to_fp8(), source, tmp_path / "whole")
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


def test_machines_may_share_the_shards_and_the_last_one_ends_the_folder(tmp_path, source):
    names = sorted(path.name for path in source.glob("*.safetensors"))
    first = rewrite_folder(to_fp8(), source, tmp_path / "out", only_files=names[2:])
    assert not first.is_complete and not (tmp_path / "out" / "config.json").exists()
    assert rewrite_folder(to_fp8(), source, tmp_path / "out", only_files=names[:2]).is_complete
    rewrite_folder(to_fp8(), source, tmp_path / "whole")
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")
    with pytest.raises(ConfigError, match="--files names lost.safetensors, no shards of"):
        rewrite_folder(to_fp8(), source, tmp_path / "other", only_files=["lost.safetensors"])


def test_what_is_in_the_folder_already_is_not_mixed_with_or_lost(tmp_path, source, monkeypatch):
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        broken_after(patch, 30, OSError(5, "input/output error"))
        with pytest.raises(OSError):
            rewrite_folder(to_fp8(), source, out)
    with pytest.raises(
        ConfigError, match="unfinished conversion with other settings .*channel.*; repeat that command"
    ):
        rewrite_folder(to_fp8("channel"), source, out)
    os.utime(source / "model-00003-of-00004.safetensors")
    with pytest.raises(ConfigError, match="unfinished conversion with other source; "):
        rewrite_folder(to_fp8(), source, out)
    rewrite_folder(to_fp8("channel"), source, out, overwrite=True)
    with pytest.raises(ConfigError, match="holds a model; choose another folder, or pass --overwrite"):
        rewrite_folder(to_fp8(), source, out)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "todo.txt").touch()
    with pytest.raises(ConfigError, match=r"notes is not empty \(todo.txt\)"):
        rewrite_folder(to_fp8(), source, tmp_path / "notes")
    with pytest.raises(ConfigError, match="todo.txt is a file; give a folder"):
        rewrite_folder(to_fp8(), source, tmp_path / "notes" / "todo.txt")
    with pytest.raises(ConfigError, match="over its own source"):
        rewrite_folder(to_fp8(), source, source / "." / "", overwrite=True)
    assert read_folder(source).keys() == tensors_of("qwen3_moe").keys()


def test_a_disk_that_is_too_small_is_refused_with_both_sizes(tmp_path, source, monkeypatch):
    gib = 1 << 30
    monkeypatch.setattr("slime.ext.low_precision.folders.target.shutil.disk_usage", lambda path: Namespace(free=gib))
    monkeypatch.setattr("slime.ext.low_precision.folders.target.RESERVE_BYTES", gib + gib // 2)
    with pytest.raises(ConfigError, match=r"needs 1\.50 GiB more, its disk has 1\.00 GiB free"):
        rewrite_folder(to_fp8(), source, tmp_path / "deep" / "out")
    assert not (tmp_path / "deep").exists()


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (lambda f: (f / "config.json").unlink(), ConfigError, "config.json does not exist"),
        (lambda f: (f / "config.json").write_text("{"), DataError, "config.json is not JSON"),
        (
            lambda f: (f / "model-00002-of-00004.safetensors").unlink(),
            DataError,
            r"1 of 4 shards that .* model-00002-of-00004\.safetensors; finish the download",
        ),
        (lambda f: forget_in_index(f, "model-00004-of-00004"), DataError, "leaves out model-00004-of-00004"),
        (
            lambda f: rename_in_index(f, "model.norm.weight", "model.lost.weight"),
            DataError,
            "names 1 tensors that are not in",
        ),
        (
            lambda f: cut(f / "model-00003-of-00004.safetensors", -1),
            DataError,
            "its header says .*; copy it again",
        ),
    ],
)
def test_a_damaged_source_is_refused_before_anything_is_written(tmp_path, source, damage, error, message):
    damage(source)
    with pytest.raises(error, match=message):
        rewrite_folder(to_fp8(), source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def rename_in_index(folder, old, new):
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"][new] = index["weight_map"].pop(old)
    (folder / INDEX).write_text(json.dumps(index))


def forget_in_index(folder, file):
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] = {name: of for name, of in index["weight_map"].items() if file not in of}
    (folder / INDEX).write_text(json.dumps(index))


def cut(path, size):
    path.write_bytes(path.read_bytes()[:size])


def test_other_programs_read_the_files(tmp_path):
    tensors = tensors_of("qwen3") | {"model.scalar": torch.tensor(3.0), "model.empty": torch.zeros(0, 4)}
    source = write_folder(tmp_path / "plain", tensors, shards=1)
    rewrite_folder(to_fp8(), source, tmp_path / "out")
    with safe_open(tmp_path / "out" / "model-00001-of-00001.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert file.get_tensor("model.scalar").item() == 3.0 and file.get_tensor("model.empty").shape == (0, 4)
        slices = file.get_slice("model.layers.0.mlp.up_proj.weight")
        assert slices.get_dtype() == "F8_E4M3" and slices.get_shape() == [320, 160]


def damaged(folder):
    """Flip the last byte of the second shard, keeping its size and recorded digests."""
    paths = sorted(folder.glob("*.safetensors"))
    FolderDigests(folder, {path.name: pieces_of_file(path) for path in paths}).write()
    data = paths[1].read_bytes()
    paths[1].write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    return paths[1]


def test_what_a_conversion_writes_has_digests_also_when_it_was_interrupted(tmp_path, source, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(run.Target, "close", lambda *unused: pytest.fail("here"))
        with pytest.raises(pytest.fail.Exception, match="here"):
            rewrite_folder(to_fp8(), source, tmp_path / "fp8")
    noted = sorted((tmp_path / "fp8").glob(".*.digests"))
    assert len(noted) == 4
    noted[0].unlink()  # of a shard that an earlier version finished
    rewrite_folder(to_fp8(), source, tmp_path / "fp8")
    rewrite_folder(to_fp8(), source, tmp_path / "whole")
    assert files_of(tmp_path / "fp8") == files_of(tmp_path / "whole")
    check_in_background(tmp_path / "fp8").result()
    path = damaged(tmp_path / "fp8")
    with pytest.raises(DataError, match=f"{path.name} is damaged"):
        check_in_background(tmp_path / "fp8").result()
    assert check_in_background(source) is None


def test_a_damaged_shard_of_the_source_is_named_and_its_successor_has_no_name(tmp_path, source):
    path = damaged(source)
    with pytest.raises(DataError, match=f"{path.name} is damaged.*--no-verify-checkpoint"):
        rewrite_folder(to_fp8(), source, tmp_path / "fp8")
    assert not (tmp_path / "fp8" / INDEX).exists() and not (tmp_path / "fp8/model-00002-of-00004.safetensors").exists()
    rewrite_folder(to_fp8(), source, tmp_path / "anyway", verify=False)


@pytest.mark.parametrize("name", sorted(FOLDERS.keys() - {"digests nested"}))
def test_a_broken_source_is_named_in_one_line(tmp_path, name):
    assert "json" in (said := one_line(lambda: open_source(write_broken_folder(name, tmp_path)))) or "a.safe" in said
