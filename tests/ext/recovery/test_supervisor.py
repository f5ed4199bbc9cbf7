"""A failed driver is restarted; one that ended permanently is not."""

from __future__ import annotations

import signal
import threading
from argparse import Namespace
from pathlib import Path

import pytest

from slime.ext.recovery import supervisor
from slime.ext.recovery.supervisor import supervise

PROGRAM = """
import os, signal, sys
from pathlib import Path

count = Path(sys.argv[1])
count.write_text(str(number := int(count.read_text()) + 1))
assert "--supervise" not in sys.argv
{}
"""


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(supervisor, "time", Namespace(sleep=lambda seconds: None))
    count = tmp_path / "count"
    count.write_text("0")

    def run(body: str, *words: str, **options) -> tuple[int, int]:
        program = tmp_path / "driver.py"
        program.write_text(PROGRAM.format(body))
        code = supervise(str(program), [str(count), "--supervise", *words], **options)
        return code, int(count.read_text())

    return run


def test_a_driver_that_fails_is_started_again_until_it_ends_well(start, capfd):
    body = """
if number == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if number == 2:
    print("slime job failed: EngineDiedError: the manager died", file=sys.stderr)
    sys.exit(1)
"""
    assert start(body) == (0, 3)
    said = capfd.readouterr().err
    assert "the driver failed (killed by SIGKILL); restarting it, 1 of 3 times" in said
    assert "the driver failed (EngineDiedError: the manager died); restarting it, 2 of 3 times" in said


@pytest.mark.parametrize("code", [0, 2, 130])
def test_a_driver_that_ended_for_good_is_not_started_again(start, code):
    assert start(f"sys.exit({code})") == (code, 1)


def test_too_many_failures_end_it_with_the_list_of_all_and_old_ones_do_not_count(start, capfd):
    body = 'print(f"slime job failed: ValueError: {number}", file=sys.stderr)\nsys.exit(1)'
    assert start(body, "--max-recoveries", "1") == (1, 2)
    said = capfd.readouterr().err
    assert "failed 2 times within an hour (--max-recoveries 1). First cause:" in said
    assert said.endswith("slime supervisor:   1. ValueError: 1\nslime supervisor:   2. ValueError: 2\n")
    hours = iter(range(0, 40000, 4000))
    assert start("sys.exit(0 if number == 8 else 1)", "--max-recoveries", "1", clock=lambda: next(hours)) == (0, 8)


def test_a_signal_reaches_the_driver(start):
    body = """
signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))
os.kill(os.getppid(), signal.SIGTERM)
signal.pause()
"""
    assert threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM)
    assert start(body) == (130, 1)
    assert signal.getsignal(signal.SIGTERM) is before
