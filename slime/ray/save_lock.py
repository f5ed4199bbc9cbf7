"""One job at a time writes to a ``--save`` folder.

The lock is the kernel's, on ``job.lock`` in the folder: it ends with the process that holds it, however that ends.
The file says who holds it.  A file system whose locks do not reach other hosts guards against jobs of one host only.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from slime.utils.errors import ConfigError

LOCK_FILE = "job.lock"
logger = logging.getLogger(__name__)


def lock_folders(folders: Mapping[str, str | None]) -> list[SaveLock]:
    """Take the locks of the folders that a job writes to, by the flags that name them.

    Raises:
        ConfigError: another job holds one of them; no lock is held then.
    """
    locks: list[SaveLock] = []
    for flag, folder in folders.items():
        if folder is None or any(Path(folder).resolve().is_relative_to(lock.path.parent.resolve()) for lock in locks):
            continue
        try:
            locks.append(SaveLock(folder, flag))
        except ConfigError:
            for lock in locks:
                lock.release()
            raise
    return locks


class SaveLock:
    """The right to write to one folder, until :meth:`release` or the end of the process."""

    def __init__(self, folder: str | Path, flag: str = "--save") -> None:
        """Take the lock; one that a dead job left behind is taken over.

        Args:
            folder: made when it is missing.
            flag: that names it, for errors.

        Raises:
            ConfigError: another job holds it, or the folder cannot be written.
        """
        self.path = Path(folder) / LOCK_FILE
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = self._open()
            if left := self._holder():
                logger.warning("%s %s: taking over the lock of a job that has ended: %s", flag, folder, left)
            started = time.strftime("%Y-%m-%d %H:%M:%S %z")
            holder = {"host": socket.gethostname(), "pid": os.getpid(), "started": started}
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, json.dumps(holder).encode(), 0)
        except BlockingIOError:
            raise ConfigError(
                f"{flag} {folder} belongs to a job that is running: {self._holder()}. Two jobs would remove each "
                f"other's checkpoints; wait for its end, end it, or give another {flag}."
            ) from None
        except OSError as error:
            raise ConfigError(f"{flag} {folder} cannot be written ({error.strerror}); give another folder.") from error

    def _open(self) -> int:
        """Return the descriptor of the locked file, which is still the one in the folder."""
        while True:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self.path.exists() and os.fstat(descriptor).st_ino == self.path.stat().st_ino:
                    return descriptor
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)  # its last holder removed it in between

    def _holder(self) -> str:
        """Return who wrote the file, in words; empty when nobody did."""
        try:
            content = json.loads(self.path.read_bytes() or b"{}")
            return ", ".join(f"{name} {content[name]}" for name in ("host", "pid", "started") if name in content)
        except (OSError, ValueError, TypeError):
            return f"unknown ({self.path} is damaged)"

    def release(self) -> None:
        """Give the folder free."""
        self.path.unlink(missing_ok=True)
        os.close(self._descriptor)
