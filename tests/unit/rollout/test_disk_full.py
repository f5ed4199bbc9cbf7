"""A disk that is full while a file is written.  The kernel refuses: no writer is faked."""

from __future__ import annotations

import contextlib
import resource
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import pytest

from slime.observability.dumps import dump_rollout, load_rollout_dump, save_train_dump
from slime.utils.errors import DataError
from slime.utils.types import Sample


@contextlib.contextmanager
def full_disk(room_bytes: int) -> Iterator[None]:
    """No file of this process may grow beyond ``room_bytes``; Python ignores the signal, so that writes fail."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def dump_args(path: Path, **flags: bool) -> Namespace:
    return Namespace(save_debug_rollout_data=str(path / "{rollout_id}.pt"), **{"debug_rollout_only": False, **flags})


SAMPLES = [Sample(index=k, prompt="x" * 1000) for k in range(100)]


def test_a_dump_without_room_is_named_and_the_run_goes_on(tmp_path, caplog):
    args = dump_args(tmp_path)
    with full_disk(1000):
        dump_rollout(args, 3, SAMPLES)
        dump_rollout(args, 3, SAMPLES, evaluation=True)
    assert "The dump of rollout 3 cannot be written" in caplog.text and "eval_3" in caplog.text
    assert "--save-debug-rollout-data" in caplog.text
    assert list(tmp_path.iterdir()) == [], "half a dump keeps no room"
    dump_rollout(args, 4, SAMPLES)
    assert len(load_rollout_dump(args.save_debug_rollout_data, 4)) == 100


def test_train_data_without_room_is_a_clear_error(tmp_path):
    shard = {"dp_rank": 0, "partition": range(100), "samples": [{"text": "x" * 1000}] * 100}
    with full_disk(1000), pytest.raises(DataError, match=r"train data of rollout 2 .*--save-debug-train-data"):
        save_train_dump(str(tmp_path / "{rollout_id}.pt"), 2, 0, [shard])
    assert list(tmp_path.iterdir()) == []
