"""Bytes of the ledger that are not as they were written: every one is found, and none takes a prompt along."""

from __future__ import annotations

import os
import shutil
import struct
import zlib
from pathlib import Path

import pytest

from slime.ext.ledger.frames import (
    OLD_MAGIC,
    STRIPPED,
    Kind,
    encode_value,
    read_folder,
    read_segment,
    segment_files,
    segment_path,
)
from slime.ext.ledger.segments import compact
from tests.ext.ledger.test_ledger import Process, died_in_rollout_1
from tests.ext.ledger.test_segments import frame, numbers, open_writer
from tools.ledger import main as tool


@pytest.fixture(scope="module")
def ledger(tmp_path_factory) -> Path:
    """A small ledger with an index, whole segments and the segment of a process that was killed."""
    folder = tmp_path_factory.mktemp("run")
    process = Process(folder)
    process.rollout(0)
    process.ledger.trained(0)
    process.save(0)
    process.rollout(1)
    process.die()
    return folder / "ledger"


def damage(folder: Path) -> list[str]:
    records = read_folder(folder, verify_blobs=True)
    return [record.head["file"] for record in records if record.kind is Kind.DAMAGED]


def flip(path: Path, offset: int, mask: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        [byte] = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ mask]))


def test_a_flip_of_any_byte_of_any_file_is_found(ledger, tmp_path):
    folder = shutil.copytree(ledger, tmp_path / "ledger")
    assert damage(folder) == []
    files = segment_files(folder)
    assert {path.name.split("-")[0] for path in files} == {"index", "segment"}
    for path in files:
        for offset in range(path.stat().st_size):
            mask = 1 << offset % 8
            flip(path, offset, mask)
            assert damage(folder) == [path.name], f"byte {offset} of {path.name}"
            flip(path, offset, mask)


def test_the_check_fails_and_says_where(ledger, tmp_path, capsys):
    folder = shutil.copytree(ledger, tmp_path / "ledger")
    assert tool([str(folder), "--check"]) == 0
    capsys.readouterr()
    for path in segment_files(folder):
        for offset in (0, 9, path.stat().st_size // 2, path.stat().st_size - 1):
            flip(path, offset, 0x10)
            assert tool([str(folder), "--check"]) == 1
            assert f"BROKEN  damaged, {path.name} at byte" in capsys.readouterr().out
            flip(path, offset, 0x10)


@pytest.mark.parametrize("at", ["begin", "middle", "end"])
def test_a_page_of_zeros_is_damage_and_no_unfinished_record(tmp_path, at):
    path = segment_path(tmp_path, 0)
    data = b"".join(frame(number) for number in range(100))
    offset = {"begin": 0, "middle": 4096, "end": len(data) - 4096}[at]
    path.write_bytes(data[:offset] + bytes(4096) + data[offset + 4096 :])
    assert [record.kind for record in read_segment(path)][-1] is Kind.DAMAGED


def test_a_segment_that_is_cut_or_gone_is_found_unless_it_is_the_one_of_a_kill(tmp_path):
    def written(folder: Path) -> list[Path]:
        writer = open_writer(folder, is_threaded=False)
        for number in range(6):
            writer.put(number)
            if number % 2:
                writer.rotate()
        writer.close()
        return segment_files(folder)

    size = written(tmp_path / "size")[1].stat().st_size
    first_frame = len(frame(0))
    for kept in (0, 30, size - first_frame, size - 1):
        files = written(tmp_path / str(kept))
        os.truncate(files[1], kept)
        assert damage(tmp_path / str(kept)) == [files[1].name]
    files = written(tmp_path / "gone")
    files[1].unlink()
    assert damage(tmp_path / "gone") == [files[1].name]
    files = written(tmp_path / "killed")
    os.truncate(files[2], files[2].stat().st_size - 1)
    open_writer(tmp_path / "killed", is_threaded=False).close()
    files[3].unlink()
    assert damage(tmp_path / "killed") == [files[3].name], "its number is missing"


def test_compaction_keeps_a_damaged_segment_and_the_check_goes_on_to_fail(tmp_path, caplog):
    process = Process(tmp_path)
    for rollout_id in range(3):
        process.rollout(rollout_id)
        process.ledger.trained(rollout_id)
    process.die()
    folder = tmp_path / "ledger"
    damaged = segment_files(folder)[1]
    data = damaged.read_bytes()
    flip(damaged, 100, 1)
    broken = damaged.read_bytes()
    for _ in range(2):
        process.save(2)
        process.die()
        assert damaged.read_bytes() == broken
        assert tool([str(tmp_path), "--check"]) == 1
        process.rollout(3) if _ == 0 else None
    assert [path.name for path in folder.glob("segment-*") if path != damaged] == [segment_files(folder)[-1].name]
    assert f"{damaged.name} at byte" in caplog.text
    assert len(data) == len(broken)


def test_compaction_keeps_a_segment_with_damaged_samples_or_without_its_end(tmp_path):
    for name, harm in {
        "samples": lambda path: flip(path, path.stat().st_size - 5, 1),
        "end": lambda path: os.truncate(path, path.stat().st_size - len(frame(1))),
    }.items():
        folder = tmp_path / name
        writer = open_writer(folder, is_threaded=False)
        for number in range(4):
            writer.put(number)
            if number % 2:
                writer.rotate()
        writer.close()
        harm(segment_path(folder, 1))
        compact(folder, first_needed=2)
        assert segment_path(folder, 1).exists() and not segment_path(folder, 0).exists()
        assert damage(folder) == ["segment-00000001.led"]
        compact(folder, first_needed=2)
        assert segment_path(folder, 1).exists()


def test_a_flip_anywhere_costs_generation_and_no_group(tmp_path, caplog):
    """Whatever byte is flipped after a crash, the rollouts hand over the same groups."""
    died_in_rollout_1(tmp_path / "whole")
    sizes = [(path.name, path.stat().st_size) for path in segment_files(tmp_path / "whole" / "ledger")]
    for name, size in sizes:
        for offset in range(0, size, 41):
            folder = tmp_path / f"{name}-{offset}"
            shutil.copytree(tmp_path / "whole", folder)
            flip(folder / "ledger" / name, offset, 1 << offset % 8)
            caplog.clear()
            process = Process(folder)
            assert process.rollout(0) == [0, 1] and process.rollout(1) == [2, 3]
            assert "damaged" in caplog.text or process.generated == [4, 4], "of no use for what is left"
            process.save(1)
            process.die()
            shutil.rmtree(folder)


def test_groups_that_a_process_took_over_from_before_a_damage_are_generated_again(tmp_path):
    died_in_rollout_1(tmp_path)
    second = Process(tmp_path)
    second.rollout(0)
    with pytest.raises(KeyboardInterrupt):
        second.rollout(1, stop_after=1)
    second.die()
    first_file = segment_files(tmp_path / "ledger")[0]
    flip(first_file, 0, 1)
    third = Process(tmp_path)
    assert third.rollout(0) == [0, 1] and third.rollout(1) == [2, 3]
    assert {0, 1, 2} <= set(third.generated)


def test_ledgers_of_earlier_versions_are_read(tmp_path):
    old = struct.Struct("<BBHIIII")

    def old_frame(kind: Kind, head: dict, blob: bytes, flags: int = 0) -> bytes:
        body = encode_value(head)
        start = old.pack(OLD_MAGIC, kind, flags, len(body), len(blob), 0, zlib.crc32(blob))
        crc = zlib.crc32(body, zlib.crc32(start))
        return old.pack(OLD_MAGIC, kind, flags, len(body), len(blob), crc, zlib.crc32(blob)) + body + blob

    index, segment = tmp_path / "index-00000000.led", segment_path(tmp_path, 1)
    index.write_bytes(old_frame(Kind.TRAINED, {"number": 1, "r": 0}, b"", STRIPPED))
    whole = old_frame(Kind.TRAINED, {"number": 2, "r": 0}, b"blob") + old_frame(
        Kind.TRAINED, {"number": 3, "r": 0}, b"x"
    )
    segment.write_bytes(whole)
    assert numbers(tmp_path) == [1, 2, 3]
    assert [record.read_blob() for record in read_segment(segment)] == [b"blob", b"x"]
    segment.write_bytes(whole[:-1])
    assert numbers(tmp_path) == [1, 2]
    writer = open_writer(tmp_path, is_threaded=False)
    writer.put(4)
    writer.close()
    assert numbers(tmp_path) == [1, 2, 4]
    segment_path(tmp_path, 2).unlink()
    for offset in (0, 1, 3, 12, 17, 22, len(whole) // 2 - 2):
        segment.write_bytes(whole)
        flip(segment, offset, 1)
        assert damage(tmp_path) == [segment.name], offset
