"""Segments on disk: order, torn tails, rotation, retirement, and a disk that is full."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from slime.ext.ledger import segments as segments_module
from slime.ext.ledger.frames import (
    Kind,
    next_number,
    pack_frame,
    read_folder,
    segment_files,
    segment_path,
)
from slime.ext.ledger.segments import JournalWriter, retire
from slime.utils.errors import DataError
from tests.eventually import wait_until


def frame(number: int) -> bytes:
    return pack_frame(Kind.TRAINED, {"number": number, "rollout": 0, "r": 0}, bytes([number % 256]) * 100)


def open_writer(folder: Path, **options: Any) -> JournalWriter:
    return JournalWriter(folder, frame, **({"flush_s": 0.001, "timeout_s": 5.0} | options))


def numbers(folder: Path) -> list[int]:
    return [record.head["number"] for record in read_folder(folder) if record.kind is Kind.TRAINED]


def test_records_come_back_in_order_over_many_segments(tmp_path):
    writer = open_writer(tmp_path)
    for number in range(500):
        writer.put(number)
        if number % 50 == 0:
            writer.rotate()
    writer.close()
    assert numbers(tmp_path) == list(range(500))
    assert len(segment_files(tmp_path)) > 3
    assert [record.read_blob() for record in read_folder(tmp_path) if record.kind is Kind.TRAINED][7] == bytes(
        [7]
    ) * 100


def test_the_thread_writes_within_the_flush_interval(tmp_path):
    writer = open_writer(tmp_path)
    writer.put(1)
    wait_until(lambda: numbers(tmp_path) == [1], "the record in the file", timeout_s=10)
    writer.close()


def test_a_tail_cut_at_any_byte_loses_only_the_record_that_it_cuts(tmp_path):
    whole = frame(1) + frame(2)
    path = segment_path(tmp_path, 0)
    for cut in range(len(frame(1)), len(whole)):
        path.write_bytes(whole[:cut])
        assert [record.head["number"] for record in read_folder(tmp_path)] == [1]
    path.write_bytes(whole)
    assert [record.head["number"] for record in read_folder(tmp_path)] == [1, 2]


def test_a_disk_that_stays_full_ends_the_job_with_the_flags_that_help(tmp_path, monkeypatch):
    writer = open_writer(tmp_path, timeout_s=0.05, is_threaded=False)

    def full(descriptor: int, data: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(segments_module.os, "write", full)
    writer.put(1)
    with pytest.raises(DataError, match="No space left.*--rollout-ledger-dir"):
        writer.flush()
    with pytest.raises(DataError, match="--no-rollout-ledger"):
        writer.put(2)


def test_a_record_that_cannot_be_encoded_is_named_and_the_next_one_is_written(tmp_path, caplog):
    def encode(number: int) -> bytes:
        if number == 1:
            raise RuntimeError("strange object")
        return frame(number)

    writer = JournalWriter(tmp_path, encode, flush_s=0.001, timeout_s=5.0, is_threaded=False)
    for number in range(3):
        writer.put(number)
    writer.close()
    assert numbers(tmp_path) == [0, 2]
    assert "strange object" in caplog.text


def test_segments_below_the_first_needed_are_retired_and_their_numbers_are_not_used_again(tmp_path):
    writer = open_writer(tmp_path, is_threaded=False)
    for number in range(6):
        writer.put(number)
        if number % 2:
            writer.rotate()
    writer.close()
    assert retire(tmp_path, first_needed=2) > 0
    assert numbers(tmp_path) == [4, 5]
    assert [path.name for path in segment_files(tmp_path)] == ["segment-00000002.led", "segment-00000003.led"]
    assert next_number(tmp_path) == 4
