"""Run a program that can harm nothing: ``python sandbox.py FOLDER PROGRAM [ARGUMENT...]``.

The program gets namespaces of its own for processes, mounts, network and IPC, and no capability.  It sees no process
but its children, no network and no device; every file system is read-only but for FOLDER.  Linux 5.12 or later, as
root or where users may make namespaces.  Where this cannot be had, nothing is run: the reason is written to
FOLDER/unprotected, and the exit status is 125.

A program by itself, without imports from slime: the process must have one thread when it enters the namespaces.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys

UNPROTECTED = "unprotected"
"""The file with the reason why nothing was run."""
EXIT_UNPROTECTED = 125
LARGEST_FILE = 1 << 26
"""Bytes that the program may write into one file."""

NEW_NS, NEW_UTS, NEW_IPC, NEW_USER, NEW_PID, NEW_NET = (
    0x00020000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000,
)  # fmt: skip
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_MOVE, MS_REC, MS_PRIVATE = 2, 4, 8, 4096, 8192, 16384, 1 << 18
AT_FDCWD, AT_RECURSIVE, SYS_MOUNT_SETATTR = -100, 0x8000, 442
ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV = 1, 2, 4
PR_SET_PDEATHSIG, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 24, 38
DEVICES = ("null", "zero", "full", "random", "urandom")

_libc = ctypes.CDLL(None, use_errno=True)


def main(folder: str, program: list[str]) -> int:
    """Run ``program`` and return its exit status, 128 + N when signal N ended it."""
    try:
        _enter_namespaces()
        child = os.fork()  # the first process of the new namespace, which no signal from within can end
        if child == 0:
            _seal(folder)
    except OSError as error:
        _refuse(folder, error)
    if child == 0:
        os.execvp(program[0], program)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


def _refuse(folder: str, error: OSError) -> None:
    with open(os.path.join(folder, UNPROTECTED), "w") as file:
        file.write(f"{error.filename or 'namespaces'}: {error.strerror}")
    os._exit(EXIT_UNPROTECTED)


def _enter_namespaces() -> None:
    """Leave those of the caller: as a user of a namespace of users, or as root without one."""
    user, group = os.getuid(), os.getgid()
    rest = NEW_NS | NEW_UTS | NEW_IPC | NEW_PID | NEW_NET
    try:
        _call("unshare", NEW_USER | rest)
    except OSError:
        if user != 0:
            raise
        _call("unshare", rest)
        return
    for file, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{file}", "w") as opened:
            opened.write(text)


def _seal(folder: str) -> None:
    """Make everything read-only but ``folder``, and give up every capability."""
    _call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    _mount("none", "/", None, MS_REC | MS_PRIVATE)
    _mount(folder, folder, None, MS_BIND)
    _mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    devices = os.path.join(folder, "devices")
    os.makedirs(devices, exist_ok=True)
    _mount("tmpfs", devices, "tmpfs", MS_NOSUID)
    for name in DEVICES:
        open(os.path.join(devices, name), "w").close()
        _mount(f"/dev/{name}", os.path.join(devices, name), None, MS_BIND)
    for name, target in (("fd", "fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        os.symlink(f"/proc/self/{target}", os.path.join(devices, name))
    _mount(devices, "/dev", None, MS_MOVE)
    if os.path.isdir("/run") and not os.path.realpath(folder).startswith("/run/"):
        _mount("tmpfs", "/run", "tmpfs", MS_NOSUID)  # sockets of services, which read-only mounts do not close
    _set_attributes("/", AT_RECURSIVE, ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV, 0)
    _set_attributes(folder, 0, 0, ATTR_RDONLY)
    for name in DEVICES:
        _set_attributes(f"/dev/{name}", 0, 0, ATTR_NODEV)
    os.chdir(os.getcwd())  # the same folder, through the mounts made above
    os.setsid()
    resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST_FILE, LARGEST_FILE))
    _call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    for capability in range(64):
        if _libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0):
            break  # past the last one that the kernel has


def _call(name: str, *arguments: object) -> None:
    if getattr(_libc, name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name)


def _mount(source: str, target: str, kind: str | None, flags: int) -> None:
    kind_bytes = None if kind is None else kind.encode()
    if _libc.mount(os.fsencode(source), os.fsencode(target), kind_bytes, ctypes.c_ulong(flags), None):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), f"mount of {target}")


def _set_attributes(path: str, flags: int, set_: int, clear: int) -> None:
    attributes = (ctypes.c_uint64 * 4)(set_, clear, 0, 0)
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    done = _libc.syscall(
        SYS_MOUNT_SETATTR, AT_FDCWD, os.fsencode(path), flags, ctypes.byref(attributes), size
    )  # fmt: skip
    if done:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), f"mount_setattr of {path}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
