"""PID, mount, network, IPC and user namespaces, with a file system of what a program may read.  Needs Linux 5.12."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import socket
import struct
from typing import Any

USER = 65534
"""User and group id of programs, unless they keep those of the caller."""
HOST = "/.host"

NEW_NS, NEW_CGROUP, NEW_UTS, NEW_IPC, NEW_USER, NEW_PID, NEW_NET = (
    0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000,
)  # fmt: skip
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
MNT_DETACH = 2
AT_FDCWD, AT_RECURSIVE, SYS_MOUNT_SETATTR = -100, 0x8000, 442
ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV = 1, 2, 4
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 4, 24, 38
CAPABILITY_VERSION_3 = 0x20080522
SIOCSIFFLAGS, IFF_UP = 0x8914, 1
DEVICES = ("null", "zero", "full", "random", "urandom")
SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}

_libc = ctypes.CDLL(None, use_errno=True)


def enter(keeps_user: bool) -> None:
    """Enter new namespaces; the new PID namespace applies to children only."""
    os.umask(0o022)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # the kernel's first choice when memory runs out
    others = NEW_NS | NEW_CGROUP | NEW_UTS | NEW_IPC | NEW_PID | NEW_NET
    user, group = os.getuid(), os.getgid()
    with _second_user_mapped(user == 0 and not keeps_user) as mapped:
        try:
            call("unshare", NEW_USER | others)
        except OSError:
            if user != 0:
                raise
            call("unshare", others)  # root does not need a user namespace
            return
    if mapped and mapped.pop():
        return
    inside = (user, group) if keeps_user else (USER, USER)
    for file_name, text in (
        ("setgroups", "deny"), ("uid_map", f"{inside[0]} {user} 1"), ("gid_map", f"{inside[1]} {group} 1"),
    ):  # fmt: skip
        with open(f"/proc/self/{file_name}", "w") as opened:
            opened.write(text)


@contextlib.contextmanager
def _second_user_mapped(is_wanted: bool) -> Any:
    """Map root and ``USER`` into the user namespace entered in the block, from a helper process outside it.

    After the block, the yielded list holds one bool: whether the mapping succeeded.  If the caller is root, programs
    run as ``USER``, because the kernel does not limit the number of root's processes.
    """
    done: list[bool] = []
    if not is_wanted:
        yield done
        return
    read_end, write_end = os.pipe()
    helper = os.fork()
    if helper == 0:
        os.close(write_end)
        os.read(read_end, 1)  # until the other end is closed
        try:
            for name in ("uid_map", "gid_map"):
                with open(f"/proc/{os.getppid()}/{name}", "w") as opened:
                    opened.write(f"0 0 1\n{USER} {USER} 1")
        except OSError:
            os._exit(1)
        os._exit(0)
    try:
        yield done
    finally:
        os.close(write_end)
        os.close(read_end)
        done.append(os.waitpid(helper, 0)[1] == 0)


def build_root(spec: dict[str, Any]) -> None:
    """Build a file system with only what ``spec`` names, and make it this process's root; call ``enter`` first."""
    _mount("none", "/", None, MS_REC | MS_PRIVATE)
    size = f"mode=755,size={spec['disk_bytes']},nr_inodes={spec['files']}"
    _mount("tmpfs", "/usr", "tmpfs", MS_NOSUID | MS_NODEV, size)  # any folder that exists on every machine
    os.mkdir(f"/usr{HOST}")
    if os.uname().machine not in SYS_PIVOT_ROOT:
        raise OSError(0, f"{os.uname().machine} processors are not supported", "pivot_root")
    call("syscall", SYS_PIVOT_ROOT[os.uname().machine], b"/usr", f"/usr{HOST}".encode())
    os.chdir("/")
    writable = list(spec["writable"])
    if spec["folder"] is not None:
        os.mkdir("/tmp")
        os.makedirs(spec["folder"])
        for path in ("/tmp", spec["folder"]):
            with contextlib.suppress(OSError):  # USER is not mapped: the only user already owns it
                os.chown(path, USER, USER)
        _mount("/tmp", "/tmp", None, MS_BIND)
        writable.append("/tmp")
    for path in [*spec["readable"], *spec["writable"]]:
        if not os.path.lexists(path):
            _make_target(path, os.path.isdir(HOST + path))
        _mount(HOST + path, path, None, MS_BIND | MS_REC)
    for path, target in spec["links"]:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.symlink(target, path)
    for path, text in spec["texts"].items():
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w") as file:
            file.write(text)
    for path in ("/dev", "/proc", "/run"):
        os.makedirs(path, exist_ok=True)
    # A container that hides parts of its /proc does not allow mounting another: programs then have no /proc.
    with contextlib.suppress(PermissionError):
        _mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    _make_devices()
    os.symlink("/tmp", "/dev/shm")
    call("umount2", HOST.encode(), MNT_DETACH)
    os.rmdir(HOST)
    _set_attributes("/", AT_RECURSIVE, ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV, 0)
    for path in writable:
        _set_attributes(path, 0, 0, ATTR_RDONLY)
    for name in DEVICES:
        _set_attributes(f"/dev/{name}", 0, 0, ATTR_NODEV)
    _bring_loopback_up()
    socket.sethostname("sandbox")


def change_directory(path: str) -> None:
    """Change to ``path`` in the new root, or to / if it does not exist."""
    os.chdir(path if os.path.isdir(path) else "/")


def drop_privileges(keeps_user: bool) -> None:
    """Irrevocably drop root and all capabilities."""
    for capability in range(64):
        if _libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0):
            break  # past the kernel's last capability, or not permitted, in which case there are none to drop
    if not keeps_user and os.getuid() == 0:
        with contextlib.suppress(OSError):  # groups may be unchangeable; all visible files are public anyway
            os.setgroups([])
        os.setresgid(USER, USER, USER)
        os.setresuid(USER, USER, USER)
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    header = struct.pack("Ii", CAPABILITY_VERSION_3, 0)
    call("capset", header, bytes(24))
    if os.getpid() == 1:
        call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # end with the outer process that waits for this one
    call("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)  # other processes cannot read this one; execve resets it for programs
    os.setsid()


def _make_target(path: str, is_folder: bool) -> None:
    os.makedirs(path if is_folder else os.path.dirname(path), exist_ok=True)
    if not is_folder:
        open(path, "w").close()


def _make_devices() -> None:
    for name in DEVICES:
        open(f"/dev/{name}", "w").close()
        _mount(f"{HOST}/dev/{name}", f"/dev/{name}", None, MS_BIND)
    for name, target in (("fd", "fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        os.symlink(f"/proc/self/{target}", f"/dev/{name}")


def _bring_loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP))


def call(name: str, *arguments: object) -> None:
    """Call a C library function that returns 0 on success; raise OSError otherwise."""
    if getattr(_libc, name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name)


def _mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    words = [None if word is None else os.fsencode(word) for word in (source, target, kind, options)]
    if _libc.mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[3]):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), f"mount of {target}")


def _set_attributes(path: str, flags: int, set_: int, clear: int) -> None:
    attributes = (ctypes.c_uint64 * 4)(set_, clear, 0, 0)
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    if _libc.syscall(SYS_MOUNT_SETATTR, AT_FDCWD, os.fsencode(path), flags, ctypes.byref(attributes), size):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), f"mount_setattr of {path}")
