"""Blocks system calls of isolated programs that namespaces do not cover.

These are calls that affect the whole kernel, reach into other processes, create namespaces or hold memory outside the
limits, and socket families that leave the network namespace (AF_VSOCK).
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

PR_SET_SECCOMP, MODE_FILTER = 22, 2
LOAD, EQUAL, GREATER, ANY_BIT, RETURN = 0x20, 0x15, 0x25, 0x45, 0x06
ALLOW, KILL_PROCESS, REFUSE = 0x7FFF0000, 0x80000000, 0x00050000
NUMBER, ARCHITECTURE, FIRST_ARGUMENT, SECOND_ARGUMENT, THIRD_ARGUMENT = 0, 4, 16, 24, 32
"""Offsets in ``struct seccomp_data``; for arguments, of the low half."""

MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""machine -> (column in the tables below, the kernel's AUDIT_ARCH value)"""

REFUSED = {
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51),
    "unshare": (272, 97), "setns": (308, 268), "sethostname": (170, 161), "setdomainname": (171, 162),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "fanotify_init": (300, 262),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "reboot": (169, 142), "syslog": (103, 116),
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106), "acct": (163, 89),
    "open_by_handle_at": (304, 265), "name_to_handle_at": (303, 264), "quotactl": (179, 60),
    "memfd_create": (319, 279), "shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180),
    "swapon": (167, 224), "swapoff": (168, 225), "settimeofday": (164, 170), "clock_settime": (227, 112),
    "adjtimex": (159, 171), "clock_adjtime": (305, 266), "personality": (135, 92), "lookup_dcookie": (212, 18),
    "move_pages": (279, 239), "migrate_pages": (256, 238), "modify_ldt": (154, None), "iopl": (172, None),
    "ioperm": (173, None), "uselib": (134, None), "sysfs": (139, None), "nfsservctl": (180, 42),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431),
    "fsmount": (432, 432), "fspick": (433, 433), "pidfd_getfd": (438, 438), "process_madvise": (440, 440),
    "mount_setattr": (442, 442), "quotactl_fd": (443, 443), "memfd_secret": (447, 447),
}  # fmt: skip
REFUSED_TO_ONE_PROCESS = {
    "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281),
    "socket": (41, 198), "socketpair": (53, 199),
}  # fmt: skip
"""Also blocked with ``only_threads``: starting processes or programs, and sockets."""
REFUSED_TO_READERS = {
    "creat": (85, None), "openat2": (437, 437), "rename": (82, None), "renameat": (264, 38), "renameat2": (316, 276),
    "unlink": (87, None), "unlinkat": (263, 35), "rmdir": (84, None), "mkdir": (83, None), "mkdirat": (258, 34),
    "link": (86, None), "linkat": (265, 37), "symlink": (88, None), "symlinkat": (266, 36), "mknod": (133, None),
    "mknodat": (259, 33), "truncate": (76, 45), "ftruncate": (77, 46), "chmod": (90, None), "fchmod": (91, 52),
    "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, None), "fchown": (93, 55), "lchown": (94, None),
    "fchownat": (260, 54), "utime": (132, None), "utimes": (235, None), "futimesat": (261, None),
    "utimensat": (280, 88), "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7),
    "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16), "kill": (62, 129),
    "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424),
}  # fmt: skip
"""Also blocked with ``only_reads``: changes to the file system, and signals.  ``WRITES`` lists blocked open flags."""
OPEN = (((2, None), SECOND_ARGUMENT), ((257, 56), THIRD_ARGUMENT))
"""open and openat, with the offset of their flags."""
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC

CLONE, CLONE3, SOCKET, IOCTL = (56, 220), 435, (41, 198), (16, 29)
LAST = 462
"""Number of the last known call; later ones fail with ENOSYS."""
CLONE_THREAD, NEW_NAMESPACES = 0x00010000, 0x7E020080
SOCKET_FAMILIES = (1, 2, 10)
"""Unix, IPv4 and IPv6, which are confined to a file system or network namespace."""
TERMINAL_INPUT = (0x5412, 0x541C)
"""TIOCSTI and TIOCLINUX, which insert input into a terminal."""


def install(*, only_threads: bool = False, only_reads: bool = False) -> None:
    """Block the calls for this process and its children.

    Args:
        only_threads: Also block starting processes and programs, and sockets.
        only_reads: Also block writing files and sending signals.

    Raises:
        OSError: the kernel or the processor does not support seccomp filters.
    """
    code = b"".join(_program(only_threads, only_reads))
    buffer = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer))
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_SECCOMP, MODE_FILTER, header, 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), "seccomp")


def _program(only_threads: bool, only_reads: bool) -> list[bytes]:
    machine = os.uname().machine
    if machine not in MACHINES:
        raise OSError(0, f"{machine} processors are not supported", "seccomp")
    column, architecture = MACHINES[machine]
    code = [_step(LOAD, ARCHITECTURE), _step(EQUAL, architecture, 1, 0), _step(RETURN, KILL_PROCESS)]
    code += [_step(LOAD, NUMBER), _step(GREATER, LAST, 0, 1), _step(RETURN, REFUSE | errno.ENOSYS)]
    # Without clone3, glibc creates threads with clone, whose flags a filter can check.
    code += [_step(EQUAL, CLONE3, 0, 1), _step(RETURN, REFUSE | errno.ENOSYS)]
    refused = [
        *REFUSED.values(),
        *(REFUSED_TO_ONE_PROCESS.values() if only_threads else ()),
        *(REFUSED_TO_READERS.values() if only_reads else ()),
    ]
    for numbers in refused:
        if (number := numbers[column]) is not None:
            code += [_step(EQUAL, number, 0, 1), _refusal(errno.EPERM)]
    checks = [_step(ANY_BIT, NEW_NAMESPACES, 0, 1), _refusal(errno.EPERM)]
    if only_threads:
        checks += [_step(ANY_BIT, CLONE_THREAD, 1, 0), _refusal(errno.EPERM)]
    for numbers, flags in OPEN if only_reads else ():
        if (number := numbers[column]) is not None:
            code += _of_call(number, flags, [_step(ANY_BIT, WRITES, 0, 1), _refusal(errno.EPERM)])
    code += _of_call(CLONE[column], FIRST_ARGUMENT, checks)
    allowed = [_step(EQUAL, family, len(SOCKET_FAMILIES) - place, 0) for place, family in enumerate(SOCKET_FAMILIES)]
    code += _of_call(SOCKET[column], FIRST_ARGUMENT, [*allowed, _refusal(errno.EAFNOSUPPORT)])
    typing = [step for request in TERMINAL_INPUT for step in (_step(EQUAL, request, 0, 1), _refusal(errno.EPERM))]
    code += _of_call(IOCTL[column], SECOND_ARGUMENT, typing)
    return [*code, _step(RETURN, ALLOW)]


def _of_call(number: int, argument: int, checks: list[bytes]) -> list[bytes]:
    """Apply ``checks`` to an argument of call ``number`` and then allow it; skip other calls."""
    steps = [_step(LOAD, argument), *checks, _step(RETURN, ALLOW)]
    return [_step(EQUAL, number, 0, len(steps)), *steps]


def _refusal(number: int) -> bytes:
    return _step(RETURN, REFUSE | number)


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)
