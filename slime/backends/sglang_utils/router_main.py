"""The router's process: ``python -m slime.backends.sglang_utils.router_main OWNER_PID`` with RouterArgs on stdin.

The router is a Rust program with a Python binding.  Its launcher is not used, because it imports all of SGLang for a
debugging mode, which takes ten seconds.  While the router runs, no Python thread of its process can run, so its parent
process watches the owner.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time

from slime.backends.sglang_utils.child_process import owner_pid, read_settings

PR_SET_PDEATHSIG = 1
POLL_S = 0.5


def route() -> None:
    """Route until killed.  The process dies with its parent, whose only thread lives as long as the parent."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    settings = read_settings()
    from sglang_router.router import Router
    from sglang_router.router_args import RouterArgs

    Router.from_args(RouterArgs(**settings)).start()


def watch(owner: int, router: int) -> int:
    """Wait until the router or the owner ends; return the router's exit status."""
    while os.getppid() == owner:
        ended, status = os.waitpid(router, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status) & 0xFF
        time.sleep(POLL_S)
    os.kill(router, signal.SIGKILL)
    return 1


if __name__ == "__main__":
    child = os.fork()
    if child == 0:
        route()
    else:
        sys.exit(watch(owner_pid(), child))
