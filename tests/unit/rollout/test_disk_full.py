"""A disk that becomes full while a file is written.  The kernel refuses; no writer is faked."""

from __future__ import annotations

import contextlib
import json
import resource
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import pytest

from slime.observability import logging_utils
from slime.observability.dumps import dump_rollout, load_rollout_dump, save_train_dump
from slime.utils.errors import DataError
from slime.utils.files import write_atomically
from slime.utils.types import Sample


@contextlib.contextmanager
def full_disk(room_bytes: int) -> Iterator[None]:
    """Limit files of this process to ``room_bytes``; Python ignores the signal, so that writes fail."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_half_a_file_gives_its_room_back(tmp_path):
    path = tmp_path / "state"
    path.write_bytes(b"old")
    with full_disk(1000), pytest.raises(DataError, match="What it is cannot be written .*--flag"):
        write_atomically(path, lambda file: file.write(bytes(100_000)), what="What it is", flag="--flag")
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["state"]


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


def test_a_dump_that_is_the_purpose_of_the_run_ends_it(tmp_path):
    with full_disk(1000), pytest.raises(DataError, match=r"The dump of rollout 0 cannot be written .*--save-debug"):
        dump_rollout(dump_args(tmp_path, debug_rollout_only=True), 0, SAMPLES)


def test_train_data_without_room_is_a_clear_error(tmp_path):
    shard = {"dp_rank": 0, "partition": range(100), "samples": [{"text": "x" * 1000}] * 100}
    with full_disk(1000), pytest.raises(DataError, match=r"train data of rollout 2 .*--save-debug-train-data"):
        save_train_dump(str(tmp_path / "{rollout_id}.pt"), 2, 0, [shard])
    assert list(tmp_path.iterdir()) == []


def test_metrics_without_room_are_lost_and_the_run_goes_on(tmp_path, caplog):
    args = Namespace(save=str(tmp_path), wandb_run_id="run")
    logging_utils.init_tracking(args)
    with full_disk((tmp_path / "metrics.jsonl").stat().st_size + 5):
        logging_utils.log(args, {"rollout/step": 1, "rollout/raw_reward": 0.5}, "rollout/step")
    logging_utils.log(args, {"rollout/step": 2, "rollout/raw_reward": 0.5}, "rollout/step")
    logging_utils.finish_tracking(args)
    assert "Metrics of rollout/step 1 are lost" in caplog.text
    last = (tmp_path / "metrics.jsonl").read_text().splitlines()[-1]
    assert json.loads(last)["rollout/step"] == 2
