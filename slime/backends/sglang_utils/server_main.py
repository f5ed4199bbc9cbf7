"""The engine's process: ``python -m slime.backends.sglang_utils.server_main OWNER_PID`` with ServerArgs on stdin.

SGLang starts its scheduler and detokenizer with multiprocessing's spawn, which imports this module again in each of
them, under the name ``__mp_main__`` and before anything of SGLang: so what stands at the top holds for the whole tree.
On a CPU they are forked instead (:func:`cpu_shim.fork_processes`) and inherit it.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import sys

from slime.backends.sglang_utils import cpu_shim, sglang_plugin
from slime.backends.sglang_utils.child_process import end_with_owner, owner_pid, read_settings

if __name__ in ("__main__", "__mp_main__"):
    end_with_owner(owner_pid() if __name__ == "__main__" else os.getppid())
    cpu_shim.install()
    cpu_shim.ignore_pinning()
    # SGLang's debugging tools import megatron.core where they find it.  That takes seconds, and it turns the memory
    # saver to a mode in which CUDA graphs cannot be released; an engine has no use for it.
    sys.modules["megatron"] = None  # type: ignore[assignment]  # makes the import fail as if it were not installed
    sglang_plugin.register()


def main() -> None:
    """Serve until killed."""
    settings = read_settings()
    cpu_shim.fork_processes(lambda: end_with_owner(os.getppid()))
    from sglang.launch_server import run_server
    from sglang.srt.server_args import ServerArgs

    from slime.backends.sglang_utils.server_args import keep_known

    known = {field.name for field in dataclasses.fields(ServerArgs) if field.init}
    if settings.get("enable_metrics") and _metrics_break_routes():
        print("metrics are off: with the installed FastAPI they would make /v1/loads answer 500", flush=True)
        settings["enable_metrics"] = False
    if settings.get("grammar_backend") is None and importlib.util.find_spec("xgrammar") is None:
        print("xgrammar is not installed: requests with a grammar will be refused", flush=True)
        settings["grammar_backend"] = "none"
    run_server(ServerArgs(**keep_known(settings, known)))


def _metrics_break_routes() -> bool:
    """Return True with a newer FastAPI, whose included routers have no path: SGLang's metrics fail on them."""
    from fastapi import routing

    return hasattr(routing, "_IncludedRouter")


if __name__ == "__main__":
    main()
