"""Saves on a disk that loses unsynced data, on a full disk, and with a limit on the number kept."""

from __future__ import annotations

import os
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from slime.backends.megatron_utils.actor import MegatronTrainRayActor
from slime.backends.megatron_utils.checkpoint import (
    load_checkpoint,
    publish_checkpoint,
    save_checkpoint,
)
from slime.backends.megatron_utils.checkpoints import checkpoint_writer
from slime.backends.megatron_utils.checkpoints.checkpoint_writer import BackgroundSave
from slime.backends.megatron_utils.model import build_model
from slime.flags.checkpoint import inspect_checkpoint
from slime.utils.errors import DataError
from tests.unit.backends.megatron_utils.megatron_case import hf_flags, parse, start_single_process, write_hf_model
from tests.unit.rollout.test_disk_full import full_disk
from tests.unit.weights.test_file_digests import check_digests


@pytest.fixture(scope="module")
def case(tmp_path_factory) -> tuple[Namespace, Any]:
    folder = tmp_path_factory.mktemp("hf")
    write_hf_model(folder, "qwen3")
    args = parse(*hf_flags(folder), "--load", str(folder))
    start_single_process(args)
    return args, build_model(args, wrap_with_ddp=False)


@pytest.fixture
def run(case, tmp_path) -> tuple[Namespace, Any]:
    args, model = case
    start_single_process(args)
    folder = str(tmp_path / "run")
    return Namespace(**{**vars(args), "save": folder, "load": folder, "no_load_rng": True}), model


def save(run: tuple[Namespace, Any], iteration: int, **options: Any) -> Path:
    args, model = run
    return save_checkpoint(args, iteration, model, None, None, **options)


class LossyDisk:
    """The state after a power cut: each file as last synced, each folder with the names of its last sync.

    A rename within a folder survives only if the folder was synced afterwards.
    """

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.contents: dict[int, bytes] = {}
        self.names: dict[Path, dict[str, int]] = {}
        fsync = os.fsync

        def recorded(descriptor: int) -> None:
            fsync(descriptor)
            path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            if path.is_dir():
                self.names[path] = {entry.name: entry.stat().st_ino for entry in path.iterdir()}
            else:
                self.contents[os.fstat(descriptor).st_ino] = path.read_bytes()

        monkeypatch.setattr(os, "fsync", recorded)

    def after_a_power_cut(self, target: Path, folder: Path | None = None) -> Path:
        folder = folder or self.root
        target.mkdir()
        for name, inode in self.names.get(folder, {}).items():
            path = folder / name
            if path.is_dir():
                self.after_a_power_cut(target / name, path)
            else:
                (target / name).write_bytes(self.contents.get(inode, b""))
        return target


@pytest.mark.parametrize("in_background", [False, True])
def test_a_checkpoint_that_counts_survives_the_loss_of_all_that_was_not_synced(
    in_background, run, tmp_path, monkeypatch
):
    args, model = run
    disk = LossyDisk(Path(args.save), monkeypatch)
    background = BackgroundSave(publish_checkpoint) if in_background else None
    folder = save(run, 5, background=background)
    if background is not None:
        background.publish(args.save, 5)
        background.wait()
    else:
        publish_checkpoint(args.save, 5)
    left = disk.after_a_power_cut(tmp_path / "left")
    assert inspect_checkpoint(str(left), "--load").iteration == 5
    assert {path.name for path in (left / folder.name).iterdir()} == {path.name for path in folder.iterdir()}
    for path in folder.iterdir():
        assert (left / folder.name / path.name).read_bytes() == path.read_bytes(), path
    again = build_model(args, wrap_with_ddp=False)
    assert load_checkpoint(Namespace(**{**vars(args), "load": str(left)}), again) == 5


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("room_bytes", [0, 20_000])
def test_a_full_disk_is_named_and_leaves_only_the_checkpoint_before(room_bytes, in_background, run):
    args, _ = run
    before = save(run, 1)
    publish_checkpoint(args.save, 1)
    content = {path.name: path.read_bytes() for path in before.iterdir()}
    background = BackgroundSave(publish_checkpoint) if in_background else None
    with full_disk(room_bytes), pytest.raises(DataError) as raised:
        save(run, 2, background=background)
        background.wait()
    message = str(raised.value)
    assert "iter_0000002" in message and "File too large" in message and "folder is removed" in message
    assert "unexpected pos" not in message and "Traceback" not in message
    assert sorted(path.name for path in Path(args.save).iterdir()) == [
        "iter_0000001",
        "latest_checkpointed_iteration.txt",
    ]
    assert {path.name: path.read_bytes() for path in before.iterdir()} == content
    found = inspect_checkpoint(args.save, "--load")
    assert (found.folder, found.iteration) == (before, 1)
    save(run, 2)  # continues once there is room


def test_only_the_newest_checkpoints_up_to_the_present_one_are_kept(run):
    args, _ = run
    first = save(run, 1)
    for iteration in (2, 3, 10):
        shutil.copytree(first, first.with_name(f"iter_{iteration:07d}"))
    (Path(args.save) / "release").mkdir()
    publish_checkpoint(args.save, 3, keep_last=2)
    left = sorted(path.name for path in Path(args.save).iterdir() if path.is_dir())
    assert left == [
        "iter_0000002",
        "iter_0000003",
        "iter_0000010",
        "release",
    ]  # 10 belongs to a run that this one leaves alone
    publish_checkpoint(args.save, 3)
    assert len([path for path in Path(args.save).iterdir() if path.is_dir()]) == 4


def test_what_a_killed_save_left_counts_for_none_of_those_that_are_kept(run):
    args, _ = run
    first = save(run, 1)
    for iteration in (2, 3, 4):
        shutil.copytree(first, first.with_name(f"iter_{iteration:07d}"))
    (first.with_name("iter_0000003") / "metadata.json").unlink()
    publish_checkpoint(args.save, 4, keep_last=2)
    left = sorted(path.name for path in Path(args.save).iterdir() if path.is_dir())
    assert left == ["iter_0000002", "iter_0000004"]


def test_a_critic_keeps_the_checkpoint_beside_the_actors_last_until_the_actors_next_counts(run):
    args, _ = run
    first = save(run, 1)
    shutil.copytree(first, first.with_name("iter_0000002"))
    for role, left in (("critic", ["iter_0000001", "iter_0000002"]), ("actor", ["iter_0000002"])):
        rank: Any = Namespace(args=Namespace(keep_last=1, ref_update_interval=None), role=role)
        MegatronTrainRayActor._publish(rank, args.save, 2)
        assert sorted(path.name for path in Path(args.save).iterdir() if path.is_dir()) == left


def test_the_checkpoint_that_holds_the_reference_is_kept_until_the_reference_changes(run):
    args, _ = run
    first = save(run, 1)
    flags = Namespace(keep_last=1, ref_update_interval=3, num_critic_only_steps=0)
    rank: Any = Namespace(args=flags, role="actor")
    for iteration, left in ((2, [2]), (3, [2, 3]), (4, [2, 4]), (5, [5])):
        shutil.copytree(
            first if iteration == 2 else first.with_name("iter_0000002"), first.with_name(f"iter_{iteration:07d}")
        )
        MegatronTrainRayActor._publish(rank, args.save, iteration)
        names = sorted(path.name for path in Path(args.save).iterdir() if path.is_dir())
        assert names == [f"iter_{number:07d}" for number in left]


def test_a_rank_that_waits_in_vain_for_the_files_of_another_says_so_and_leaves_no_folder(run, monkeypatch):
    args, _ = run

    def wait(*_: Any, **__: Any) -> None:
        raise RuntimeError("Timed out waiting 86400000ms for recv operation to complete")

    monkeypatch.setattr(checkpoint_writer.dcp, "save", wait)
    with pytest.raises(DataError, match="Timed out waiting.*folder is removed"):
        save(run, 2)
    assert not (Path(args.save) / "iter_0000002").exists()


def test_digests_cover_every_byte_of_a_checkpoint(run):
    assert check_digests(save(run, 4))
