"""Files that others wrote: only whole files of a bounded size, inside of the folder in which they are named.

A folder that somebody gives away can hold a link to any file of its reader, a pipe on which a read waits for ever, or
a device or a file with holes that fills the memory.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from slime.utils.errors import DataError, SlimeError

MAX_TEXT_BYTES = 512 << 20
"""Of files of JSON."""


def check_inside(path: Path) -> None:
    """Refuse a file that is a link out of its folder; the hub's cache keeps its files in ``blobs`` nearby.

    Raises:
        DataError: it leads elsewhere.
    """
    if not path.is_symlink():
        return
    folder, target = Path(os.path.realpath(path.parent)), Path(os.path.realpath(path))
    snapshots = [above for above in folder.parents if above.name == "snapshots"]
    if target.parent not in (folder, *(above.parent / "blobs" for above in snapshots)):
        raise DataError(f"{path} is a link to {target}, outside of its folder; put the file itself there.")


@contextmanager
def opened(path: Path, *, max_bytes: int | None = None, error: type[SlimeError] = DataError) -> Iterator[BinaryIO]:
    """Open a file for reading, once it is one.

    Args:
        path: the file.
        max_bytes: that it may have; None for a file of which only parts are read.
        error: raised when it is something else.

    Raises:
        OSError: the file system's, such as FileNotFoundError.
        DataError: it leads out of its folder.
    """
    check_inside(path)
    # A pipe would wait for its writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            raise error(f"{path} is a folder, a pipe or a device, and a file is needed. Copy it again.")
        if max_bytes is not None and about.st_size > max_bytes:
            raise error(f"{path} has {about.st_size} bytes, and at most {max_bytes} are read. Copy it again.")
        yield file


def read_outside_file(path: Path, *, max_bytes: int = MAX_TEXT_BYTES) -> bytes:
    """Return the content of a file.

    Raises:
        DataError: it cannot be read, is no file, leads out of its folder, or is larger than ``max_bytes``.
    """
    try:
        with opened(path, max_bytes=max_bytes) as file:
            return file.read(max_bytes + 1)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}).") from error
