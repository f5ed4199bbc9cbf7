"""The engine's process: ``python -m slime.backends.sglang_utils.server_main OWNER_PID`` with ServerArgs on stdin.

SGLang starts its scheduler and detokenizer with multiprocessing's spawn, which imports this module again in each of
them, as ``__mp_main__`` and before any module of SGLang, so the top of this file runs in every process.  On a CPU they
are forked instead (:func:`cpu_shim.fork_processes`) and inherit its effects.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import sys
from typing import Any

from slime.backends.sglang_utils import cpu_shim, sglang_plugin
from slime.backends.sglang_utils.child_process import PLUGINS, end_with_family, ending_family, owner_pid, read_settings
from slime.backends.sglang_utils.server_guard import guard_as_parent, guard_port
from slime.utils import env
from slime.utils.distributed_utils import bind_stores
from slime.utils.misc import load_function

if __name__ in ("__main__", "__mp_main__"):
    end_with_family(owner_pid() if __name__ == "__main__" else os.getppid())
    cpu_shim.install()
    cpu_shim.ignore_pinning()
    # SGLang's debugging tools import megatron.core if it is installed.  Engines do not need it; the import takes
    # seconds, and switches the memory saver to a mode in which CUDA graphs cannot be released.
    sys.modules["megatron"] = None  # type: ignore[assignment]  # makes the import fail as if it were not installed
    sglang_plugin.register()
    for path, *arguments in json.loads(env.get_str(PLUGINS, "[]") or "[]"):
        load_function(path)(*arguments)
    guard_as_parent()
    bind_stores()


def main() -> None:
    """Serve until killed."""
    settings = read_settings()
    secret = settings.pop("job_secret")
    if secret is not None:
        guard_port(
            secret,
            settings["host"],
            settings["port"],
            is_encoder=bool(settings.get("encoder_only")),
            encoders=settings.get("encoder_urls") or (),
            pass_on=settings.get("tokenizer_worker_num", 1) > 1,
        )
    cpu_shim.fork_processes(lambda: end_with_family(os.getppid()))
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    from slime.backends.sglang_utils.server_args import keep_known

    load_plugins()  # first: ServerArgs reads config.json, which hooks of families fix
    known = {field.name for field in dataclasses.fields(ServerArgs) if field.init}
    if settings.get("enable_metrics"):
        _make_metrics_work(settings)
    if settings.get("grammar_backend") is None and importlib.util.find_spec("xgrammar") is None:
        print("xgrammar is not installed: requests with a grammar will be refused", flush=True)
        settings["grammar_backend"] = "none"
    run_server(ServerArgs(**keep_known(settings, known)))


def _make_metrics_work(settings: dict[str, Any]) -> None:
    """Fix the server's app for SGLang's metrics, or turn metrics off if other processes serve HTTP."""
    if settings.get("tokenizer_worker_num", 1) > 1:
        print("metrics are off: with several tokenizer workers they would make /v1/loads answer 500", flush=True)
        settings["enable_metrics"] = False
    elif not settings.get("encoder_only"):
        from sglang.srt.entrypoints.http_server import app

        name_included_routes(app)


def name_included_routes(app: Any) -> None:
    """Add the attribute ``path``, by which metrics label requests, to entries of ``app.routes`` that lack it.

    SGLang 0.5.15 counts a request under ``route.path`` of the first matching entry.  The pinned FastAPI keeps an
    included router as one entry without that attribute, and requests to it would end with 500.
    """
    for route in app.routes:
        if not hasattr(route, "path"):
            paths = dict.fromkeys(context.path for context in route.effective_route_contexts())
            route.path = "|".join(paths)


if __name__ == "__main__":
    with ending_family():
        main()
