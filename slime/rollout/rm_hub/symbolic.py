"""Sympy with a time limit: a small pool of child processes that compare expressions.

Simplifying what a policy wrote can take for ever, or all memory, inside C code that no thread can interrupt.  So it is
done in child processes (``symbolic_worker.py``) that are killed when their time is up; the next question starts a new
one.  Children are started when the first question comes, in isolation as sandboxes are (``slime.agent.sandbox``).
Where a machine has no namespaces they keep the file system in sight, to read; all else is refused there too.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import queue
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from slime.isolation.view import PROGRAM, View, isolated_command, unsafe_command, view_for_programs
from slime.utils import env
from slime.utils.errors import ConfigError, GraderError

logger = logging.getLogger(__name__)

TIME_LIMIT_S = 5.0
"""For one expression, in a running child."""
START_LIMIT_S = 120.0
"""For a child to import sympy, on a busy machine."""
KILL_WAIT_S = 10.0
"""For the kernel to end a killed child."""
NUM_WORKERS = 2
MAX_USED_S = 600.0
"""A child is replaced after so many seconds of answering, between two questions."""
LIMITS = {"as": 2 << 30, "fsize": 0, "nofile": 64, "nproc": 0, "cpu": int(MAX_USED_S + START_LIMIT_S + TIME_LIMIT_S)}
"""Of a child; the last one ends it where its parent is gone."""
VARIABLES = {"LANG": "C.UTF-8", "OPENBLAS_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
"""All that a child has for an environment; the job's has tokens in it.  Tasks of reasoning-gym draw from sets, so the
seed is fixed.
"""

_WORKER_FILE = Path(__file__).with_name("symbolic_worker.py")


class SymbolicWorker:
    """One child process.  Invariant: at most one question is open, and a child that missed one is never reused."""

    first_question: Mapping[str, Any] = {"expression": "1-1"}
    """Asked to see that a child has started."""
    what = "runs sympy for the math graders"
    package = "sympy"
    needs_isolation = False
    """Do not run without namespaces: what the policy wrote is evaluated."""

    def __init__(self, *, time_limit_s: float = TIME_LIMIT_S) -> None:
        self._time_limit_s = time_limit_s
        self._is_isolated = True
        self._used_s = 0.0
        self._process: subprocess.Popen[bytes] | None = None

    def answer_to(self, question: Mapping[str, Any]) -> object:
        """Return the child's answer; None when there is none within the limit."""
        process = self._running()
        began = time.monotonic()
        try:
            answer = self._ask(process, question, self._time_limit_s)
            self._used_s += time.monotonic() - began
            if self._used_s > MAX_USED_S:
                self.close()
            return answer
        except (TimeoutError, OSError, ValueError) as error:
            length = sum(len(str(part)) for part in question.values())
            logger.info("The process that %s gave up on a question of %d characters: %s", self.what, length, error)
            self.close()
            return None

    def close(self) -> None:
        """End the child."""
        if self._process is not None:
            self._process.kill()
            try:
                self._process.wait(KILL_WAIT_S)
            except subprocess.TimeoutExpired:  # stuck in the kernel; nobody needs it any more
                logger.warning("Process %d of the math graders outlives its SIGKILL.", self._process.pid)
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None and not pipe.closed:
                    try:
                        pipe.close()
                    except BrokenPipeError as error:
                        logger.debug("A question was left unread: %s", error)
            self._process = None

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._process, self._used_s = self._start(), 0.0
            try:
                answer = self._ask(self._process, self.first_question, START_LIMIT_S)
                if isinstance(answer, dict) and "error" in answer:
                    raise ValueError(answer["error"])
            except (TimeoutError, OSError, ValueError) as error:
                self.close()
                if self._is_isolated and not self.needs_isolation and not isinstance(error, TimeoutError):
                    self._run_without_namespaces(f"the process that {self.what} does not start in them")
                    return self._running()
                raise GraderError(
                    f"The process that {self.what} did not start: {error}. Try '{sys.executable} -c \"import "
                    f"{self.package}\"'."
                ) from error
        return self._process

    def _start(self) -> subprocess.Popen[bytes]:
        words = unsafe_command(View(readable=(), limits=LIMITS))
        if self._is_isolated:
            try:
                words = isolated_command(replace(view_for_programs("/tmp/grader", disk_mib=1), limits=LIMITS))
            except ConfigError as error:
                self._run_without_namespaces(str(error))
        seccomp = os.path.realpath(PROGRAM.with_name("seccomp.py"))
        program = [sys.executable, "-sPc", _WORKER_FILE.read_text(encoding="utf-8"), seccomp]
        return self._start_by([*words, *program])

    def _run_without_namespaces(self, reason: str) -> None:
        self._is_isolated = False
        logger.warning(
            "The process that %s runs without namespaces: %s. It may read files of this user; it can write none, and "
            "has no network, no other process and no variable of this job.",
            self.what,
            reason.rstrip("."),
        )

    def _start_by(self, command: list[str]) -> subprocess.Popen[bytes]:
        """Start a program with ``VARIABLES`` alone; outside of namespaces packages may be in PYTHONPATH."""
        path = None if self._is_isolated else env.get_str("PYTHONPATH")
        return self._popen(command, env=VARIABLES | ({"PYTHONPATH": path} if path else {}), cwd="/")

    @staticmethod
    def _popen(words: list[str], **options: Any) -> subprocess.Popen[bytes]:
        pipe = subprocess.PIPE
        return subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, **options)

    @staticmethod
    def _ask(process: subprocess.Popen[bytes], question: Mapping[str, Any], limit_s: float) -> object:
        """Send one line, read one line.

        Raises:
            TimeoutError: no answer in time.
            OSError, ValueError: the child is gone or broke the protocol.
        """
        assert process.stdin is not None and process.stdout is not None
        deadline = time.monotonic() + limit_s + 1.0

        def wait_until(pipe: IO[bytes], event: int) -> None:
            # Not select(): a rollout holds thousands of connections, and it refuses file descriptors above 1023.
            poll = select.poll()
            poll.register(pipe, event)
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise TimeoutError(f"no answer within {limit_s:.0f} s")

        rest = json.dumps(question).encode() + b"\n"
        os.set_blocking(process.stdin.fileno(), False)  # a child that hangs reads no more than its pipe holds
        while rest:
            wait_until(process.stdin, select.POLLOUT)
            rest = rest[os.write(process.stdin.fileno(), rest) :]
        wait_until(process.stdout, select.POLLIN)
        line = process.stdout.readline()
        if not line:
            raise OSError("the child ended (time or memory limit)")
        return json.loads(line)


class WorkerPool:
    """Children, handed out one question at a time.  Safe to call from many threads."""

    def __init__(self, workers: Sequence[SymbolicWorker]) -> None:
        self._workers = workers
        self._idle: queue.LifoQueue[SymbolicWorker] = queue.LifoQueue()
        for worker in self._workers:
            self._idle.put(worker)

    def ask(self, question: Mapping[str, Any]) -> object:
        """Return an idle child's answer to a question, None when there is none in time; wait while all are busy."""
        # Every holder gives its worker back within its limits, so this wait ends.
        worker = self._idle.get(timeout=3600)
        try:
            return worker.answer_to(question)
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        """End all children."""
        for worker in self._workers:
            worker.close()


_POOL = WorkerPool([SymbolicWorker() for _ in range(NUM_WORKERS)])
atexit.register(_POOL.close)


def is_zero(expression: str) -> bool:
    """Return True when sympy simplifies the expression to 0; False when not, not readable, or not within
    ``TIME_LIMIT_S`` seconds.

    Expressions are in the notation of a text book: ``2x`` is a product, ``x^2`` a power.
    """
    return _POOL.ask({"expression": expression}) == {"is_zero": True}


def is_same_by_math_verify(gold: str, answer: str) -> bool:
    """Return True when math-verify, which must be installed, calls the two equal within ``TIME_LIMIT_S`` seconds."""
    return _POOL.ask({"gold": gold, "answer": answer}) == {"is_same": True}
