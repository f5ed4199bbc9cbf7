"""Files that are there whole or not at all, and locks on files."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from slime.utils.errors import DataError


def write_atomically(
    path: Path, write: Callable[[IO[bytes]], Any], *, what: str, flag: str = "--save", to_disk: bool = True
) -> None:
    """Write beside ``path`` and rename: a crash leaves the old file or the new one.

    Args:
        path: of the file; its folder is made when it is missing.
        write: writes the content to the open file.
        what: the content, for the error.
        flag: where the place comes from, for the error.
        to_disk: outlive a crash of the machine, too, at the price of waiting for the disk.

    Raises:
        DataError: it cannot be written (a full disk); the old file is still there.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, write, to_disk=to_disk)
    except (OSError, RuntimeError) as error:  # torch.save says RuntimeError when its file fails
        raise DataError(
            f"{what} cannot be written to {path} ({type(error).__name__}: {error}). Free some space there, or "
            f"choose another folder with {flag}; the previous content is intact."
        ) from error


def replace_file(path: Path, write: Callable[[IO[bytes]], Any], *, to_disk: bool = True) -> None:
    """Write a file as :func:`write_atomically` does; an error is the one that the disk, or ``write``, raised."""
    unfinished = path.with_name(path.name + ".tmp")
    try:
        with unfinished.open("wb") as file:
            write(file)
            if to_disk:
                file.flush()
                os.fsync(file.fileno())
        unfinished.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink()  # half a file would take the room that is missing
        raise
    if to_disk:
        sync_to_disk(path.parent)


def sync_to_disk(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lock_file(descriptor: int, path: Path, *, timeout_s: float, poll_s: float) -> None:
    """Take the exclusive ``flock`` of the open file ``path``; it goes with the descriptor, or with the process.

    Raises:
        TimeoutError: another process has held it for ``timeout_s`` seconds.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimeoutError(f"another process has locked {path} for more than {timeout_s:g} s") from None
        time.sleep(poll_s)
