"""Run a program in isolation: ``python -I -S __main__.py outer|inner SPEC [PROGRAM...]``.

``outer`` first enters namespaces and builds the file system; ``inner`` only sets limits and blocks system calls.
Without PROGRAM it serves the host through a socket (``supervisor.py``).  SPEC is the JSON of ``view.View``.  If
isolation fails, nothing is run: the reason is printed to standard error, and the exit status is 125.
"""

from __future__ import annotations

import json
import os
import sys
import types
from typing import Any, NoReturn

HERE = os.path.dirname(os.path.abspath(__file__))


def _import_without_slime() -> None:
    """Register empty parent packages, because the real ones import third-party packages."""
    folder = HERE
    for name in ("slime.isolation", "slime"):
        package = types.ModuleType(name)
        package.__path__ = [folder]
        sys.modules[name] = package
        folder = os.path.dirname(folder)


def main(stage: str, spec: dict[str, Any], program: list[str]) -> int:
    """Run the program and return its exit status, or 128 + N if signal N ended it."""
    # Import everything now: this folder is not visible under the new root.
    from slime.isolation import namespaces, seccomp, supervisor  # noqa: F401

    if stage == "inner":
        _inside(spec, program)
    cwd = os.getcwd()
    try:
        namespaces.enter(spec["keeps_user"])
        child = os.fork()  # PID 1 of the namespace: no signal from inside ends it, and its end ends all
        if child == 0:
            namespaces.build_root(spec)
            namespaces.change_directory(cwd)
    except OSError as error:
        _refuse(error)
    if child == 0:
        _inside(spec, program)
    if spec["control"] is not None:
        os.close(spec["control"])
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


def _inside(spec: dict[str, Any], program: list[str]) -> NoReturn:
    from slime.isolation import namespaces, seccomp, supervisor

    try:
        namespaces.drop_privileges(spec["keeps_user"])
        supervisor.set_limits(spec["limits"])
        seccomp.install()
    except OSError as error:
        _refuse(error)
    if not program:
        supervisor.Supervisor(spec).serve()
        os._exit(0)
    os.execvp(program[0], program)


def _refuse(error: OSError) -> NoReturn:
    sys.stderr.write(f"{error.filename or 'namespaces'}: {error.strerror}")
    sys.stderr.flush()
    os._exit(125)


if __name__ == "__main__":
    _import_without_slime()
    sys.exit(main(sys.argv[1], json.loads(sys.argv[2]), sys.argv[3:]))
