"""A host's copy follows a chain of versions, catches up, detects damage, and survives a kill at any moment."""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import shutil
import signal
from pathlib import Path

import pytest

from slime.ext.fast_push.disk import local_copy, versions
from slime.ext.fast_push.disk.delta import DeltaBase
from slime.ext.fast_push.disk.local_copy import LocalCopy
from slime.ext.fast_push.disk.versions import (
    begin_version,
    list_folders,
    prune_before,
    remove_all,
    remove_version,
    version_folder,
)
from slime.utils.errors import ConfigError, WeightSyncError
from slime.weights.stored_tensors import read_layout
from tests.ext.fast_push.disk.disk_model import Pusher, read_model, write_model

ENCODINGS = ("xor", "overwrite")


@pytest.fixture
def pusher(tmp_path):
    write_model(tmp_path / "model")
    return Pusher(tmp_path / "model", tmp_path / "shared")


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(local_copy, "POLL_S", 0.001)


def copy_of(pusher: Pusher, name: str = "local", *, timeout_s: float = 0.05) -> LocalCopy:
    folder = pusher.root.parent / name
    return LocalCopy(folder, source=pusher.root, model=pusher.model, timeout_s=timeout_s, workers=1)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_chain_of_five_versions_is_followed_step_by_step_and_at_once(pusher, encoding):
    pusher = Pusher(pusher.model, pusher.root, encoding)
    step_by_step, at_once = copy_of(pusher), copy_of(pusher, "late")
    assert step_by_step.pull(0).seed == str(pusher.model)
    for number in range(1, 6):
        pusher.change()
        pusher.push()
        report = step_by_step.pull(number)
        assert (report.seed, report.applied) == ("", (number,))
        assert read_model(step_by_step.folder) == pusher.expected()
    assert at_once.pull(5).applied == (1, 2, 3, 4, 5)
    assert read_model(at_once.folder) == pusher.expected()
    assert at_once.pull(5).applied == ()
    state = json.loads((at_once.folder / ".weight_sync/state.json").read_text())
    assert state["version"] == "000005"


def test_a_version_with_another_base_is_refused_when_it_is_not_the_next(pusher):
    copy = copy_of(pusher)
    pusher.change()
    pusher.push()
    pusher.change()
    pusher.push()
    copy.pull(1)
    before = read_model(copy.folder)
    remove_version(version_folder(pusher.root, 1))
    pusher.change()
    pusher.push()
    remove_version(version_folder(pusher.root, 2))
    with pytest.raises(WeightSyncError, match="cannot be reached from version 1: weight_v000002 is missing"):
        copy.pull(3)
    assert read_model(copy.folder) == before
    assert copy.held() == (1, "run")


def test_a_host_that_missed_versions_starts_from_the_newest_whole_one(pusher):
    early, late = copy_of(pusher), copy_of(pusher, "late")
    for number in range(1, 4):
        pusher.change()
        pusher.push()
        early.pull(number)
    pusher.push_whole(number=3)
    left, running = (begin_version(version_folder(pusher.root, number)) for number in (2, 3))
    prune_before(pusher.root, 3)
    assert [path.name for path in list_folders(pusher.root)] == ["weight_v000003", "weight_v000003-full"]
    assert running.is_dir() and not left.exists()
    running.rmdir()
    pusher.change()
    pusher.push()
    assert early.pull(4).seed == ""
    report = late.pull(4)
    assert Path(report.seed).name == "weight_v000003-full"
    assert report.applied == (4,)
    assert read_model(late.folder) == read_model(early.folder) == pusher.expected()


def test_a_copy_of_another_run_or_another_model_is_made_anew(pusher):
    copy = copy_of(pusher)
    pusher.change()
    pusher.push()
    copy.pull(1)
    remove_all(pusher.root)
    other = Pusher(pusher.model, pusher.root, chain="another run")
    other.random.random(100)
    other.change()
    other.push()
    assert copy.pull(1).seed == str(pusher.model)
    assert read_model(copy.folder) == other.expected()
    os.utime(pusher.model / "model-1.safetensors", (1, 1))
    assert copy.pull(0).seed == str(pusher.model)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_flipped_bit_of_a_change_is_found_and_the_copy_is_made_anew(pusher, encoding):
    pusher = Pusher(pusher.model, pusher.root, encoding)
    copy = copy_of(pusher)
    copy.pull(0)
    pusher.change()
    folder = pusher.push()
    stored = read_layout(folder)["a.weight"]
    good = stored.file.read_bytes()
    damaged = bytearray(good)
    damaged[stored.begin + stored.num_bytes // 2] ^= 4
    stored.file.write_bytes(damaged)
    with pytest.raises(WeightSyncError, match=r"a\.weight.*model-00000-of-00002\.safetensors"):
        copy.pull(1)
    assert copy.held() is None
    stored.file.write_bytes(good)
    assert copy.pull(1).seed == str(pusher.model)
    assert read_model(copy.folder) == pusher.expected()


def test_a_flipped_bit_of_the_copy_is_found_when_its_tensor_changes(pusher):
    copy = copy_of(pusher)
    copy.pull(0)
    stored = read_layout(copy.folder)["a.weight"]
    content = bytearray(stored.file.read_bytes())
    content[stored.begin] ^= 1
    stored.file.write_bytes(content)
    pusher.change()
    pusher.push()
    with pytest.raises(WeightSyncError, match=r"a\.weight in .*model-1\.safetensors has the xxh3-128 checksum"):
        copy.pull(1)
    copy.pull(1)
    assert read_model(copy.folder) == pusher.expected()


@pytest.mark.parametrize("what", ["cut off", "of another model", "index is missing", "unreadable index"])
def test_a_version_that_is_not_whole_is_refused_before_a_byte_changes(pusher, what):
    copy = copy_of(pusher)
    copy.pull(0)
    pusher.change()
    folder = pusher.push()
    file = folder / "model-00001-of-00002.safetensors"
    index = folder / "model.safetensors.index.json"
    if what == "cut off":
        file.write_bytes(file.read_bytes()[:-1])
    elif what == "of another model":
        file.write_bytes(file.read_bytes().replace(b'"c.bias"', b'"d.bias"'))
    elif what == "index is missing":
        index.unlink()
    else:
        index.write_text(index.read_text()[:-20])
    with pytest.raises(Exception, match="weight_v000001"):
        copy.pull(1)
    assert copy.held() == (0, "")
    assert read_model(copy.folder) == read_model(pusher.model)


def test_another_process_at_work_is_waited_for_until_the_deadline(pusher):
    first, second = copy_of(pusher), copy_of(pusher)
    first.pull(0)
    with first._locked(), pytest.raises(WeightSyncError, match="lock.*--weight-update-timeout-s"):
        second.pull(0)
    second.pull(0)


def test_the_copy_must_not_be_the_model_or_the_shared_folder(pusher):
    for folder in (pusher.model, pusher.root):
        with pytest.raises(ConfigError, match="--update-weight-local-checkpoint-dir"):
            LocalCopy(folder, source=pusher.root, model=pusher.model, timeout_s=1)


# A kill at any moment

STEPS = (
    (local_copy, "apply_delta"), (os, "fsync"), (os, "replace"),
    (shutil, "copyfile"), (DeltaBase, "commit"),
)  # fmt: skip


def _pull_and_die(copy: LocalCopy, target: int, at_step: int) -> None:
    """Pull with every step counted; end like ``kill -9`` when the count is reached: in the middle of a step that
    writes to a file, else between that step and the next one."""
    count = 0

    def counted(function):
        def call(*arguments, **keywords):
            nonlocal count
            count += 1
            if count == at_step:
                if function.__name__ == "apply_delta":
                    arguments[0][: arguments[0].size // 2] ^= 85
                else:
                    function(*arguments, **keywords)
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **keywords)

        return call

    for owner, name in STEPS:
        setattr(owner, name, counted(getattr(owner, name)))
    copy.pull(target)
    os._exit(0)


def test_a_copy_whose_maker_is_killed_at_any_step_is_right_after_the_next_pull(pusher):
    for _ in range(2):
        pusher.change()
        pusher.push()
    expected = pusher.expected()
    context = mp.get_context("fork")
    for held in (None, 1):
        deaths = 0
        for at_step in range(1, 100):
            copy = copy_of(pusher, f"{held}-{at_step}")
            if held:
                copy.pull(held)
            process = context.Process(target=_pull_and_die, args=(copy, 2, at_step))
            process.start()
            process.join(20)
            copy.pull(2)
            assert read_model(copy.folder) == expected, f"killed at step {at_step}"
            if process.exitcode == 0:
                break
            deaths += 1
        assert process.exitcode == 0, "the pull has more steps than were tried"
        assert deaths >= (20 if held is None else 8)


def test_unfinished_versions_are_invisible_and_go_with_the_first_push(pusher):
    unfinished = versions.begin_version(version_folder(pusher.root, 7))
    versions.PartWriter(unfinished, 0)
    assert list_folders(pusher.root) == []
    with pytest.raises(WeightSyncError, match="weight_v000007 does not exist on this host"):
        copy_of(pusher).pull(7)
    (pusher.root / "notes.txt").write_text("somebody's")
    remove_all(pusher.root)
    assert [path.name for path in pusher.root.iterdir()] == ["notes.txt"]


def test_a_version_goes_though_a_reader_keeps_files_of_its_namesake_open(pusher, monkeypatch):
    """A network file system keeps such a file under another name, so its folder cannot be removed."""
    remove = versions.shutil.rmtree

    def rmtree(path, **options):
        is_there = Path(path).exists()
        remove(path, **options)
        if is_there:
            Path(path).mkdir()
            (Path(path) / ".nfs0001").touch()

    monkeypatch.setattr(versions.shutil, "rmtree", rmtree)
    for _ in range(2):
        pusher.number = 0
        remove_version(pusher.push(commit=False))
    assert versions.list_folders(pusher.root) == []
