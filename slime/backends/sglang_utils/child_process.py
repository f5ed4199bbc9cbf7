"""Start one of our own modules as a child process, feed it its settings, keep its log, and end it with its tree."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime.backends.sglang_utils.owner_watch import kill_tree
from slime.backends.sglang_utils.process_logs import new_log_file
from slime.utils import env
from slime.utils.errors import DeadlineError, EngineDiedError

logger = logging.getLogger(__name__)

REPOSITORY = Path(__file__).parents[3]
LOG_TAIL_LINES = 60


class ChildProcess:
    """A running child.  It dies with this process; its output goes to ``log_path``."""

    def __init__(
        self,
        module: str,
        settings: Mapping[str, Any],
        *,
        name: str,
        extra_environment: Mapping[str, str],
        without_variables: tuple[str, ...] = (),
    ) -> None:
        """Start ``python -m module`` and give it ``settings`` as JSON on its standard input."""
        self.name = name
        self.log_path = new_log_file(name)
        variables = {key: value for key, value in env.copy().items() if key not in without_variables}
        variables |= extra_environment
        paths = [str(REPOSITORY), *variables.get("PYTHONPATH", "").split(os.pathsep)]
        variables["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(p for p in paths if p))
        variables["PYTHONUNBUFFERED"] = "1"
        with self.log_path.open("wb") as log:
            self._popen = subprocess.Popen(
                [sys.executable, "-m", module, str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=variables,
                # A Ctrl-C on the terminal reaches the owner only, which ends its children in order.
                start_new_session=True,
            )
        logger.info("%s: process %d, log %s", name, self._popen.pid, self.log_path)
        try:
            assert self._popen.stdin is not None, "stdin was asked for as a pipe"
            self._popen.stdin.write(json.dumps(dict(settings)).encode())
            self._popen.stdin.close()
        except BrokenPipeError as error:
            raise EngineDiedError(self.describe_end() or f"{name} closed its input at once") from error

    @property
    def pid(self) -> int:
        """Process id of the child, the root of its tree."""
        return self._popen.pid

    def is_alive(self) -> bool:
        """Whether the child still runs."""
        return self._popen.poll() is None

    def describe_end(self) -> str | None:
        """How the child ended, with the end of its log; None while it runs."""
        code = self._popen.poll()
        if code is None:
            return None
        how = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
        return f"{self.name} {how}\n{self.log_tail()}"

    def log_tail(self, lines: int = LOG_TAIL_LINES) -> str:
        """The last lines of the child's output, headed by the path of the whole."""
        try:
            text = self.log_path.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            return f"(its log {self.log_path} cannot be read: {error})"
        return f"--- end of {self.log_path} ---\n" + "\n".join(text.splitlines()[-lines:])

    def stop(self, timeout_s: float = 10.0) -> None:
        """Kill the child and everything it started.

        Raises:
            DeadlineError: some process of the tree is still there after ``timeout_s`` seconds.
        """
        left = kill_tree(self.pid, timeout_s)
        if self._popen.poll() is None:
            self._popen.wait(timeout=timeout_s)
        if left:
            raise DeadlineError(f"{self.name}: processes {left} are still there {timeout_s:g} s after SIGKILL")


def read_settings() -> dict[str, Any]:
    """In the child: the settings that the owner wrote."""
    return json.load(sys.stdin)


def owner_pid() -> int:
    """In the child: the process that started it."""
    return int(sys.argv[1])
