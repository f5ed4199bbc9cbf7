"""A disk that is full while the ledger, or a checkpoint's position in it, is written; nothing is faked."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from slime.ext.ledger import segments as segments_module
from slime.ext.ledger.frames import segment_path
from slime.ext.ledger.ledger import position_path
from slime.rollout.data_source import state_path
from slime.utils.errors import DataError
from tests.eventually import wait_until
from tests.ext.ledger.test_ledger import Process
from tests.ext.ledger.test_segments import numbers, open_writer
from tests.unit.rollout.test_disk_full import full_disk


def test_a_checkpoint_without_room_names_its_file_and_the_one_before_is_whole(tmp_path):
    process = Process(tmp_path)
    process.rollout(0)
    process.save(0)
    process.rollout(1)
    with full_disk(100), pytest.raises(DataError, match=r"The data position .*global_dataset_.*_1\.pt.*--save"):
        process.source.save(1)
    position = process.ledger.position(2)
    with full_disk(10), pytest.raises(DataError, match="The position in the ledger cannot be written .*--save"):
        process.ledger.save(1, position)
    assert not list(tmp_path.rglob("*.tmp"))
    assert not state_path(str(tmp_path), 1).exists() and not position_path(str(tmp_path), 1).exists()
    process.die()
    again = Process(tmp_path, start=1)
    assert again.rollout(1) == [2, 3]
    assert again.generated == []  # the ledger had all of it


def test_the_ledger_waits_for_room_and_loses_nothing(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(segments_module, "RETRY_INTERVAL_S", 0.02)
    writer = open_writer(tmp_path, is_threaded=False)
    writer.put(0)
    writer.flush()
    with full_disk(segment_path(tmp_path, 0).stat().st_size + 50):  # part of the next record fits
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
    wait_until(lambda: text in caplog.text, f"a line of the log with {text!r}")


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


def move_away(folder: Path) -> Path:
    """Like a file system that is gone: no file can be created in ``folder``."""
    return folder.rename(folder.with_name(folder.name + "-away"))
