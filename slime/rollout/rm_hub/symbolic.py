"""Sympy with a time limit: a small pool of child processes that compare expressions.

Simplifying a policy's expression may take forever or use all memory, inside C code that no thread can interrupt.
Child processes (``symbolic_worker.py``) do it and are killed at a time limit; the next question starts a new child.
Children start with the first question and are isolated like sandboxes (``slime.agent.sandbox``).  On machines without
namespaces they can read the file system, but everything else is still denied.
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
"""Limit for one expression in a running child."""
START_LIMIT_S = 120.0
"""Limit for starting a child and importing sympy on a busy machine."""
KILL_WAIT_S = 10.0
"""Limit for the kernel to end a killed child."""
NUM_WORKERS = 2
MAX_USED_S = 600.0
"""After answering for this many seconds, a child is replaced before its next question."""
LIMITS = {"as": 2 << 30, "fsize": 0, "nofile": 64, "nproc": 0, "cpu": int(MAX_USED_S + START_LIMIT_S + TIME_LIMIT_S)}
"""Resource limits of a child.  The CPU limit ends a child whose parent is gone."""
VARIABLES = {"LANG": "C.UTF-8", "OPENBLAS_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
"""The complete environment of a child; the job's environment holds credentials.  The hash seed is fixed because
reasoning-gym tasks draw from sets.
"""

_WORKER_FILE = Path(__file__).with_name("symbolic_worker.py")


class SymbolicWorker:
    """One child process.  Invariant: at most one question is open, and a child that timed out is never reused."""

    first_question: Mapping[str, Any] = {"expression": "1-1"}
    """Asked to check that a child has started."""
    what = "runs sympy for the math graders"
    package = "sympy"
    needs_isolation = False
    """Refuse to run without namespaces, for workers that evaluate the policy's output as code."""

    def __init__(self, *, time_limit_s: float = TIME_LIMIT_S) -> None:
        self._time_limit_s = time_limit_s
        self._is_isolated = True
        self._used_s = 0.0
        self._process: subprocess.Popen[bytes] | None = None

    def answer_to(self, question: Mapping[str, Any]) -> object:
        """Return the child's answer; None if it does not answer in time or dies."""
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
        """Kill the child."""
        if self._process is not None:
            self._process.kill()
            try:
                self._process.wait(KILL_WAIT_S)
            except subprocess.TimeoutExpired:  # stuck in the kernel
                logger.warning("Process %d of the math graders is still alive after SIGKILL.", self._process.pid)
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
            "The process that %s runs without namespaces: %s. It can read this user's files, but cannot write files, "
            "use the network, start processes or see this job's environment variables.",
            self.what,
            reason.rstrip("."),
        )

    def _start_by(self, command: list[str]) -> subprocess.Popen[bytes]:
        """Start a program with the environment ``VARIABLES``, plus PYTHONPATH if it runs without namespaces."""
        path = None if self._is_isolated else env.get_str("PYTHONPATH")
        return self._popen(command, env=VARIABLES | ({"PYTHONPATH": path} if path else {}), cwd="/")

    @staticmethod
    def _popen(words: list[str], **options: Any) -> subprocess.Popen[bytes]:
        pipe = subprocess.PIPE
        return subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, **options)

    @staticmethod
    def _ask(process: subprocess.Popen[bytes], question: Mapping[str, Any], limit_s: float) -> object:
        """Send a question as one line and read the answer as one line.

        Raises:
            TimeoutError: no answer within ``limit_s`` (plus one second of margin).
            OSError, ValueError: the child is gone or broke the protocol.
        """
        assert process.stdin is not None and process.stdout is not None
        deadline = time.monotonic() + limit_s + 1.0

        def wait_until(pipe: IO[bytes], event: int) -> None:
            # select() would reject file descriptors above 1023, and a rollout holds thousands of connections.
            poll = select.poll()
            poll.register(pipe, event)
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise TimeoutError(f"no answer within {limit_s:.0f} s")

        rest = json.dumps(question).encode() + b"\n"
        os.set_blocking(process.stdin.fileno(), False)  # a hung child would block the write once its pipe is full
        while rest:
            wait_until(process.stdin, select.POLLOUT)
            rest = rest[os.write(process.stdin.fileno(), rest) :]
        wait_until(process.stdout, select.POLLIN)
        line = process.stdout.readline()
        if not line:
            raise OSError("the child ended (time or memory limit)")
        return json.loads(line)


class WorkerPool:
    """A thread-safe pool of child processes, each answering one question at a time."""

    def __init__(self, workers: Sequence[SymbolicWorker]) -> None:
        self._workers = workers
        self._idle: queue.LifoQueue[SymbolicWorker] = queue.LifoQueue()
        for worker in self._workers:
            self._idle.put(worker)

    def ask(self, question: Mapping[str, Any]) -> object:
        """Have an idle child answer a question, waiting while all are busy; None if it does not answer in time."""
        # Every holder returns its worker within its limits, so this wait ends.
        worker = self._idle.get(timeout=3600)
        try:
            return worker.answer_to(question)
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        """Kill all children."""
        for worker in self._workers:
            worker.close()


_POOL = WorkerPool([SymbolicWorker() for _ in range(NUM_WORKERS)])
atexit.register(_POOL.close)


def is_zero(expression: str) -> bool:
    """Return True if sympy simplifies the expression to 0 within ``TIME_LIMIT_S`` seconds.

    Returns False for any other result, for unreadable expressions, and on timeout.  Expressions use textbook notation:
    ``2x`` is a product, ``x^2`` a power.
    """
    return _POOL.ask({"expression": expression}) == {"is_zero": True}


def is_same_by_math_verify(gold: str, answer: str) -> bool:
    """Return True if math-verify, which must be installed, finds both equal within ``TIME_LIMIT_S`` seconds."""
    return _POOL.ask({"gold": gold, "answer": answer}) == {"is_same": True}
