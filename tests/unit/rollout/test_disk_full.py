"""A disk that is full while a checkpoint's data or the ledger is written.  The kernel refuses: no writer is faked."""

from __future__ import annotations

import contextlib
import json
import resource
import threading
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from slime.observability import logging_utils
from slime.observability.dumps import dump_rollout, load_rollout_dump, load_train_dump, save_train_dump
from slime.rollout.data_source import state_path
from slime.rollout.ledger import segments as segments_module
from slime.rollout.ledger.ledger import TRACKER, Position, position_path
from slime.utils.atomic_file import write_atomically
from slime.utils.errors import DataError
from slime.utils.types import Sample
from tests.unit.rollout.ledger.test_ledger import Process
from tests.unit.rollout.ledger.test_segments import numbers, open_writer


@contextlib.contextmanager
def full_disk(room_bytes: int) -> Iterator[None]:
    """No file of this process may grow beyond ``room_bytes``; Python ignores the signal, so that writes fail."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_checkpoint_without_room_names_its_file_and_the_one_before_is_whole(tmp_path):
    process = Process(tmp_path)
    process.rollout(0)
    process.save(0)
    process.rollout(1)
    with full_disk(100), pytest.raises(DataError, match=r"The data position .*global_dataset_.*_1\.pt.*--save"):
        process.source.save(1)
    position = process.ledger.position(2)
    with full_disk(10), pytest.raises(DataError, match="The position in the ledger cannot be written .*--save"):
        write_position_only(process, position)
    assert not list(tmp_path.rglob("*.tmp"))
    assert not state_path(str(tmp_path), 1).exists() and not position_path(str(tmp_path), 1).exists()
    process.die()
    again = Process(tmp_path, start=1)
    assert again.rollout(1) == [2, 3]
    assert again.generated == []  # all of it was in the ledger


def test_a_ledger_that_cannot_be_compacted_stays_whole_until_the_next_checkpoint(tmp_path, caplog):
    process = Process(tmp_path)
    process.rollout(0)
    process.ledger.save(0)
    (tmp_path / TRACKER).write_text("0")
    with full_disk(10):
        process.ledger.record_published(0)
    assert "keeps what is not needed any more: [Errno 27]" in caplog.text
    assert not list((tmp_path / "ledger").glob("index-*"))
    process.rollout(1)
    process.save(1)
    assert list((tmp_path / "ledger").glob("index-*"))
    process.die()
    assert Process(tmp_path, start=2).rollout(2) == [4, 5]


def write_position_only(process: Process, position: Position) -> None:
    """``Ledger.save`` without its ledger record, which must not fail first."""
    process.ledger.journal.record_saved = lambda rollout_id, first: None
    process.ledger.save(1, position)


def test_half_a_file_gives_its_room_back(tmp_path):
    path = tmp_path / "state"
    path.write_bytes(b"old")
    with full_disk(1000), pytest.raises(DataError, match="What it is cannot be written .*--flag"):
        write_atomically(path, lambda file: file.write(bytes(100_000)), what="What it is", flag="--flag")
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["state"]


def test_the_ledger_waits_for_room_and_loses_nothing(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(segments_module, "RETRY_INTERVAL_S", 0.02)
    writer = open_writer(tmp_path, is_threaded=False)
    writer.put(0)
    writer.flush()
    with full_disk(writer.bytes_written + 50):  # a part of the next record fits
        for number in range(1, 20):
            writer.put(number)
        flushing = threading.Thread(target=writer.flush)
        flushing.start()
        wait_for_log(caplog, "retrying")
    flushing.join(30)
    assert not flushing.is_alive()
    writer.close()
    assert numbers(tmp_path) == list(range(20))


def wait_for_log(caplog: pytest.LogCaptureFixture, text: str) -> None:
    give_up_s = time.monotonic() + 30
    while text not in caplog.text:
        assert time.monotonic() < give_up_s, f"nothing was logged with {text!r}"
        time.sleep(0.01)


def test_the_thread_of_a_ledger_without_room_tells_whoever_writes_next(tmp_path, monkeypatch):
    monkeypatch.setattr(segments_module, "RETRY_INTERVAL_S", 0.01)
    with full_disk(10):
        writer = open_writer(tmp_path, timeout_s=0.1)
        writer.put(1)
        with pytest.raises(DataError, match=r"cannot be written .*--rollout-ledger-dir"):
            writer.flush()
        with pytest.raises(DataError, match="--no-rollout-ledger"):
            writer.put(2)
    assert numbers(tmp_path) == []


def test_a_segment_that_cannot_be_begun_is_tried_again_and_the_old_one_stays(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(segments_module, "RETRY_INTERVAL_S", 0.01)
    writer = open_writer(tmp_path, is_threaded=False)
    writer.put(1)
    moved = move_away(tmp_path)
    rotating = threading.Thread(target=writer.rotate)
    rotating.start()
    wait_for_log(caplog, "retrying")
    moved.rename(tmp_path)
    rotating.join(30)
    writer.put(2)
    writer.close()
    assert numbers(tmp_path) == [1, 2] and writer.number == 1


def test_a_segment_that_can_never_be_begun_ends_the_job(tmp_path, monkeypatch):
    monkeypatch.setattr(segments_module, "RETRY_INTERVAL_S", 0.01)
    writer = open_writer(tmp_path, timeout_s=0.05, is_threaded=False)
    writer.put(1)
    moved = move_away(tmp_path)
    with pytest.raises(DataError, match="cannot be written"):
        writer.rotate()
    assert numbers(moved) == [1]


def move_away(folder: Path) -> Path:
    """As a file system that is gone: no file can be made in ``folder``."""
    return folder.rename(folder.with_name(folder.name + "-away"))


# --------------------------------------------------------------------------------------- what training can do without


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


def test_dumps_have_the_keys_that_readers_look_for(tmp_path):
    dump_rollout(dump_args(tmp_path), 4, SAMPLES[:1], evaluation=True)
    (path,) = tmp_path.glob("*eval_4*")
    assert torch.load(path, weights_only=False)["rollout_id"] == 4
    shards = [{"dp_rank": rank, "partition": [1 - rank], "samples": [{"tokens": [rank]}]} for rank in (0, 1)]
    dump = load_train_dump(save_train_dump(str(tmp_path / "t{rollout_id}.pt"), 2, 0, shards))
    assert [(row["sample_index"], row["data_parallel_rank"]) for row in dump["samples"]] == [(0, 1), (1, 0)]
    assert [shard["data_parallel_rank"] for shard in dump["dp_shards"]] == [0, 1]


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
