"""Which versions of a delta run are full ones."""

from __future__ import annotations

from pathlib import Path

import torch

from slime.ext.fast_push.acknowledgements import DigestedBuckets
from slime.ext.fast_push.disk import disk
from slime.ext.fast_push.disk.delta_carrier import DeltaCarrier
from slime.ext.fast_push.disk.disk import DiskOptions
from slime.ext.fast_push.disk.versions import read_version, version_folder
from slime.ext.fast_push.push import push_weights
from slime.weights.hf_files import HfFolderWriter
from slime.weights.push.participants import Participants, PushClock
from slime.weights.push.state import Push, TrainerRanks
from tests.ext.fast_push.test_tcp import Buckets


def push_versions(root: Path, *, keeps_files: bool) -> list[bool]:
    """Push two versions of a tensor that the model has in another dtype; return which of the two are full."""
    with HfFolderWriter(root / "model", assets_from=None) as writer:
        writer.add("weight", torch.zeros(6, 4))
    options = DiskOptions(
        root=root / "shared", model=root / "model", has_copies=False, keeps_files=keeps_files, continues_run=False,
        encoding="xor", checksum="xxh3-128",
    )  # fmt: skip
    carrier = DeltaCarrier(TrainerRanks(), options)
    weight = torch.zeros(6, 4, dtype=torch.bfloat16)
    source = DigestedBuckets(Buckets({"weight": weight}))
    for number in (1, 2):
        weight[number] += 1
        push_weights(Push(str(number), Participants([], PushClock(30))), source, carrier)
    folders = [version_folder(root / "shared", number) for number in (1, 2)]
    return [read_version(folder).is_whole for folder in folders]


def test_only_the_first_version_is_whole_where_the_model_cannot_be_its_base(tmp_path) -> None:
    assert push_versions(tmp_path, keeps_files=False) == [True, False]


def test_old_versions_that_cannot_be_removed_do_not_end_a_push(tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.setattr(disk, "prune_before", lambda root, number: (tmp_path / "model").rmdir())
    assert push_versions(tmp_path, keeps_files=False) == [True, False]
    assert "could not be removed: [Errno 39]" in caplog.text
