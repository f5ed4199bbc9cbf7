"""Damaged bytes in the ledger: each is found, and none loses a prompt."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

from slime.ext.ledger.frames import read_folder, segment_files
from slime.ext.ledger.records import ReplayState
from tests.ext.ledger.test_ledger import Process, died_in_rollout_1
from tests.ext.ledger.test_segments import frame, open_writer
from tools.ledger import checked
from tools.ledger import main as tool


@pytest.fixture(scope="module")
def ledger(tmp_path_factory) -> Path:
    """A small ledger with complete segments, retired ones before them, and the segment of a killed process."""
    folder = tmp_path_factory.mktemp("run")
    process = Process(folder)
    process.rollout(0)
    process.ledger.trained(0)
    process.save(0)
    process.rollout(1)
    process.die()
    return folder / "ledger"


def damage(folder: Path) -> list[str]:
    """The damaged files."""
    damaged: list[str] = []
    state = ReplayState().read(checked(read_folder(folder), damaged))
    return sorted({name for text in (state.damage, *damaged) for name in re.findall(r"segment-\d+\.led", text)})


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
    assert len(files) > 1 and files[0].name != "segment-00000000.led"
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
            assert re.search(f"BROKEN .*{path.name}.* at byte", capsys.readouterr().out)
            flip(path, offset, 0x10)


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


def test_a_flip_anywhere_costs_generation_and_no_group(tmp_path, caplog):
    """Whichever byte is flipped after a crash, the rollouts deliver the same groups."""
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
