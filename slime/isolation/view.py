"""Defines what an isolated program sees of this machine, and the command that runs it there."""

from __future__ import annotations

import functools
import json
import logging
import os
import platform
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from slime.isolation.namespaces import USER
from slime.utils.errors import ConfigError

logger = logging.getLogger(__name__)

PROGRAM = Path(__file__).with_name("__main__.py")
PROBE_TIMEOUT_S = 30.0
UNSAFE_FLAG = "--unsafe-local-sandbox"

SYSTEM = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store", "/gnu/store"),
    *("/etc/ld.so.cache", "/etc/alternatives", "/etc/ssl/certs", "/etc/localtime"),
)
"""System folders and files that programs need; they hold no user data."""
TEXTS = {
    "/etc/passwd": f"root:x:0:0::/root:/bin/sh\nsandbox:x:{USER}:{USER}::/tmp:/bin/bash\n",
    "/etc/group": f"root:x:0:\nsandbox:x:{USER}:\n",
    "/etc/hosts": "127.0.0.1 localhost sandbox\n",
    "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}
FILES_PER_MIB = 256


@dataclass(frozen=True, kw_only=True)
class View:
    """The file system and the limits of a program; passed to ``__main__.py`` as JSON."""

    readable: Sequence[str]
    """Readable paths of this machine, without symbolic links."""
    links: Sequence[tuple[str, str]] = ()
    """(path, target) of symbolic links."""
    texts: dict[str, str] = field(default_factory=dict)
    """Path -> content of additional files."""
    writable: Sequence[str] = ()
    """Writable folders of this machine."""
    folder: str | None = None
    """A writable folder in a private, in-memory /tmp; None creates no private /tmp."""
    disk_bytes: int = 1 << 20
    """Limit for everything written to the in-memory file system."""
    files: int = 65536
    """Limit for the number of files in it."""
    keeps_user: bool = False
    """Run as the user of this process instead of ``sandbox``."""
    limits: dict[str, int] = field(default_factory=dict)
    """rlimits by lower-case name."""
    memory_bytes: int = 0
    """Limit for all jobs of a supervisor together."""
    processes: int = 0
    """Limit for all jobs of a supervisor together."""
    ports: Sequence[int] = ()
    """Ports on the sandbox's loopback interface that are relayed to the host."""
    control: int | None = None
    """Descriptor of the supervisor's socket."""


def view_for_programs(folder: str, *, disk_mib: int) -> View:
    """Return a view with the system, the Python interpreter and its packages, and an empty writable ``folder``.

    Raises:
        ConfigError: the interpreter is installed in / or in the home folder, which would become readable.
    """
    prefixes = {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix}
    for prefix in prefixes:
        if os.path.realpath(prefix) in ("/", str(Path.home())):
            raise ConfigError(
                f"Python is installed into {prefix}, which programs in isolation must not read; use another Python."
            )
    wanted = [path for path in (*SYSTEM, *sorted(prefixes), str(PROGRAM.parent)) if os.path.exists(path)]
    present = sorted({os.path.realpath(path) for path in wanted})
    readable = [path for path in present if not any(_is_below(path, other) for other in present)]
    links: list[tuple[str, str]] = []
    for path in [*wanted, *_hops(sys.executable)]:
        real = os.path.realpath(path)
        present = [*readable, *(link for link, _ in links)]
        if path != real and not any(path == other or _is_below(path, other) for other in present):
            links.append((path, real))
    return View(
        readable=readable,
        links=links,
        texts=TEXTS,
        folder=folder,
        disk_bytes=disk_mib << 20,
        files=1024 + disk_mib * FILES_PER_MIB,
    )


def view_of_everything(writable: str) -> View:
    """Return a read-only view of the whole machine without /dev, /proc and /run, plus one writable folder."""
    readable, links = [], []
    for entry in sorted(os.scandir("/"), key=lambda entry: entry.name):
        if entry.is_symlink():
            links.append((entry.path, os.readlink(entry.path)))
        elif entry.name not in ("dev", "proc", "run"):
            readable.append(entry.path)
    folder = os.path.realpath(writable)
    return View(readable=readable, links=links, writable=[folder], keeps_user=True, limits={"fsize": 1 << 26})


def processes_can_be_limited() -> bool:
    """Return True if the kernel counts a namespace's processes separately from the user's others (Linux 5.14)."""
    major, minor = (int(part) for part in platform.release().split(".")[:2])
    return (major, minor) >= (5, 14)


def isolated_command(view: View) -> list[str]:
    """Return the command prefix that runs a program in isolation, in namespaces created by ``__main__.py``.

    Raises:
        IsolationError: this machine cannot isolate programs; the message says what to do.
    """
    check_isolation(keeps_user=view.keeps_user)
    return _command("outer", view)


def unsafe_command(view: View) -> list[str]:
    """Return the command prefix that runs a program as the same user without isolation.

    ``__main__.py`` still sets limits, blocks system calls and, with a supervisor, ends everything it started.
    """
    return _command("inner", replace(view, keeps_user=True))


class IsolationError(ConfigError):
    """This machine cannot isolate programs."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(
            f"Programs that the model wrote cannot be isolated on this machine ({reason}). Allow user namespaces "
            "(sysctl user.max_user_namespaces), run as root with CAP_SYS_ADMIN, or give "
            f"{UNSAFE_FLAG}, with which they may do whatever this process may."
        )


def check_local_sandbox(args: Namespace) -> None:
    """Check at startup that programs can be isolated; for ``check_args`` of plug-ins.

    Raises:
        IsolationError: this machine cannot isolate programs, and ``--unsafe-local-sandbox`` is not set.
    """
    if args.unsafe_local_sandbox:
        logger.warning("%s: programs that the model wrote may do whatever this process may.", UNSAFE_FLAG)
    else:
        check_isolation()


@functools.cache
def check_isolation(*, keeps_user: bool = False) -> None:
    """Check once per process that a program runs in isolation.

    Raises:
        IsolationError: it did not run.
    """
    view = view_of_everything(tempfile.gettempdir()) if keeps_user else view_for_programs("/tmp/probe", disk_mib=1)
    command = [*_command("outer", view), "/bin/sh", "-c", "exit 7"]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=PROBE_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise IsolationError(str(error)) from error
    if done.returncode != 7:
        raise IsolationError(done.stderr.strip()[-300:] or f"exit status {done.returncode}")


def _command(stage: str, view: View) -> list[str]:
    return [*_python(), stage, json.dumps(asdict(view))]


def _python() -> list[str]:
    return [os.path.realpath(sys.executable), "-I", "-S", os.path.realpath(PROGRAM)]


def _is_below(path: str, folder: str) -> bool:
    return path.startswith(f"{folder}/")


def _hops(path: str) -> list[str]:
    """Return ``path`` and every symbolic link between it and the file."""
    hops = [path]
    while os.path.islink(hops[-1]) and len(hops) < 40:
        hops.append(os.path.normpath(os.path.join(os.path.dirname(hops[-1]), os.readlink(hops[-1]))))
    return hops
