"""The process of one engine: start it, wait until it serves, end it with everything it started."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from slime.backends.sglang_utils import cpu_shim
from slime.backends.sglang_utils.child_process import ChildProcess
from slime.backends.sglang_utils.server_control import ServerControl
from slime.utils.errors import DeadlineError, EngineDiedError

MODULE = "slime.backends.sglang_utils.server_main"
EXPANDABLE_SEGMENTS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""The trainer may want expandable segments; SGLang's memory saver cannot work with them."""
POLL_S = 0.25


def start_server(server_args: Mapping[str, Any], *, name: str) -> ChildProcess:
    """Start an SGLang server with these ServerArgs; returns at once."""
    return ChildProcess(
        MODULE,
        server_args,
        name=name,
        extra_environment=engine_environment(tp_size=int(server_args.get("tp_size", 1))),
        without_variables=EXPANDABLE_SEGMENTS,
    )


def engine_environment(*, tp_size: int) -> dict[str, str]:
    """Variables of an engine's process: none with CUDA, what the CPU path needs without."""
    if not cpu_shim.is_needed():
        return {}
    variables = dict(cpu_shim.ENGINE_ENVIRONMENT)
    if tp_size > 1:
        cores = os.cpu_count() or 1
        variables["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(rank % cores) for rank in range(tp_size))
    return variables


def wait_until_healthy(process: ChildProcess, server: ServerControl, *, timeout_s: float) -> None:
    """Until the server generates a token.

    Raises:
        ProcessError: the process ended, or the deadline passed; with the end of the server's log.
    """
    deadline = time.monotonic() + timeout_s
    while not server.answers("/health_generate", timeout_s=max(1.0, min(30.0, deadline - time.monotonic()))):
        if end := process.describe_end():
            raise EngineDiedError(f"{end}\nThe engine ended before it served; the cause is in its log above.")
        if time.monotonic() > deadline:
            raise DeadlineError(
                f"{process.name} does not serve after {timeout_s:g} s (--engine-start-timeout-s)\n{process.log_tail()}"
            )
        time.sleep(POLL_S)
