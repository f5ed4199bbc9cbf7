"""A process that restarts the driver if it fails (``--supervise``): the same command resumes from the last save.

It imports nothing that could fail along with the driver.
"""

from __future__ import annotations

import argparse
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import IO

EXIT_INTERRUPTED = 130
FINAL_CODES = (0, 2, EXIT_INTERRUPTED)
"""Exit codes after which the driver is not restarted: success, bad input, interruption."""
FLAG = "--supervise"
WINDOW_S = 3600.0
"""Seconds over which ``--max-recoveries`` counts."""
PAUSE_S = 5.0
"""Seconds for the processes of a dead driver to notice its death."""
CAUSE = re.compile(r"^slime (?:job failed|cannot continue this run): (.*)")


def supervise(program: str, words: Sequence[str], *, clock: Callable[[], float] = time.monotonic) -> int:
    """Run ``program`` with ``words``, restarting it after failures, until it ends for good; return its exit code.

    Args:
        program: the driver, such as train.py.
        words: its command line, from which ``--max-recoveries`` is read.
        clock: returns seconds.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--max-recoveries", type=int, default=3)
    allowed = parser.parse_known_args(list(words))[0].max_recoveries
    command = [sys.executable, program, *(word for word in words if word != FLAG)]
    failures: list[tuple[float, str]] = []
    while True:
        code, cause, was_told = _run(command)
        if code in FINAL_CODES:
            return code
        if was_told:  # a terminal's Ctrl-C reaches the driver twice, so it may not exit cleanly
            return EXIT_INTERRUPTED
        now = clock()
        failures = [failure for failure in failures if now - failure[0] < WINDOW_S] + [(now, cause)]
        if len(failures) > allowed:
            _say(f"the driver failed {len(failures)} times within an hour (--max-recoveries {allowed}). First cause:")
            for number, (_, text) in enumerate(failures, start=1):
                _say(f"  {number}. {text}")
            return code if code > 0 else 1
        _say(f"the driver failed ({cause}); restarting it, {len(failures)} of {allowed} times within an hour")
        time.sleep(PAUSE_S)


def _run(command: Sequence[str]) -> tuple[int, str, bool]:
    """Run one driver; return its exit code, the cause it printed (or its status), and whether it was signalled."""
    causes: list[str] = []
    told: list[int] = []
    early: list[int] = []
    child: subprocess.Popen[str] | None = None

    def pass_on(signum: int, frame: FrameType | None) -> None:
        told.append(signum)
        if child is None:
            early.append(signum)
        else:
            child.send_signal(signum)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, errors="replace")
        for signum in early:
            child.send_signal(signum)
        assert child.stderr is not None
        reader = threading.Thread(target=_copy, args=(child.stderr, causes), daemon=True)
        reader.start()
        code = child.wait()
        reader.join(timeout=PAUSE_S)  # children of a killed driver may hold the pipe a little longer
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    died = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return code, causes[0] if causes else died, bool(told)


def _copy(lines: IO[str], causes: list[str]) -> None:
    """Copy the driver's stderr to ours and record the failure causes that it prints."""
    with lines:
        for line in lines:
            sys.stderr.write(line)
            sys.stderr.flush()
            if match := CAUSE.match(line):
                causes.append(match[1])


def _say(text: str) -> None:
    print(f"slime supervisor: {text}", file=sys.stderr, flush=True)
