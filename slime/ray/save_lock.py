"""Locks so that one job at a time writes outputs that are read back: ``--save``, ledger, weight versions, exports.

A lock is a kernel ``flock`` on ``job.lock`` in the folder, so it is released when its process ends for any reason.
The file names the holder.  On a file system with host-local locks, only jobs on the same host exclude each other.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import time
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path

from slime.flags.observability import TrackingConfig
from slime.observability.metrics_file import run_folder
from slime.utils.errors import ConfigError

LOCK_FILE = "job.lock"
logger = logging.getLogger(__name__)


def lock_outputs(args: Namespace, more: Mapping[str, str | Path]) -> list[SaveLock]:
    """Lock every output that this job writes and a job reads back.

    ``more`` maps flags to further outputs: a Path is a folder, a str is a file or folder that is replaced as a whole.

    Raises:
        ConfigError: another job holds one of them; no lock is held then.
    """
    folders = {
        "--save": args.save,
        "save of the critic (--megatron-config-path)": args.critic_args.save if args.critic_args is not None else None,
        **{flag: place for flag, place in more.items() if isinstance(place, Path)},
        "--wandb-run-id (the folder of the run)": run_folder(TrackingConfig.of(args)),
    }
    outputs = {
        "--save-hf": args.save_hf,
        **{flag: place for flag, place in more.items() if isinstance(place, str)},
        "--save-debug-rollout-data": args.save_debug_rollout_data,
        "--save-debug-train-data": args.save_debug_train_data,
    }
    return lock_folders(folders, outputs)


def lock_folders(folders: Mapping[str, str | Path | None], outputs: Mapping[str, str | None]) -> list[SaveLock]:
    """Take several locks.  A path named by two flags is locked once.

    Args:
        folders: flag -> folder.
        outputs: flag -> file or folder that is replaced as a whole; names may contain ``{rollout_id}``.

    Raises:
        ConfigError: another job holds one of them; no lock is held then.
    """
    wanted = [(flag, place, Path(place, LOCK_FILE)) for flag, place in folders.items() if place is not None]
    wanted += [(flag, place, _lock_beside(place)) for flag, place in outputs.items() if place is not None]
    locks: list[SaveLock] = []
    for flag, place, path in wanted:
        if any(path.resolve() == lock.path.resolve() for lock in locks):
            continue
        try:
            locks.append(SaveLock(place, flag, path=path))
        except ConfigError:
            for lock in locks:
                lock.release()
            raise
    return locks


def _lock_beside(output: str) -> Path:
    """Return the lock file's path: in the deepest folder of ``output`` whose name has no placeholder."""
    folder = os.path.dirname(output.rstrip("/").partition("{")[0])
    return Path(folder, f".{os.path.relpath(output, folder or '.').replace('/', '_')}.lock")


class SaveLock:
    """The right to write to one folder, until :meth:`release` or the end of the process."""

    def __init__(self, folder: str | Path, flag: str = "--save", *, path: Path | None = None) -> None:
        """Lock ``folder``, the value of ``flag``.  A lock file left behind by a dead job is taken over.

        ``path`` is the lock file, by default ``LOCK_FILE`` in the folder; its parent is created if missing.

        Raises:
            ConfigError: another job holds the lock, or the folder is not writable.
        """
        self.path = path or Path(folder) / LOCK_FILE
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = self._open()
            if left := self._holder():
                logger.warning("%s %s: taking over the lock of a job that ended: %s", flag, folder, left)
            started = time.strftime("%Y-%m-%d %H:%M:%S %z")
            holder = {"host": socket.gethostname(), "pid": os.getpid(), "started": started}
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, json.dumps(holder).encode(), 0)
        except BlockingIOError:
            raise ConfigError(
                f"{flag} {folder} belongs to a running job: {self._holder() or 'one that is just starting'}. Two jobs "
                f"would overwrite each other's files; wait until it ends, stop it, or give another {flag}."
            ) from None
        except OSError as error:
            raise ConfigError(f"{flag} {folder} cannot be written ({error.strerror}); give another folder.") from error

    def _open(self) -> int:
        """Lock the file and return its descriptor; retries if the file was replaced in the folder meanwhile."""
        while True:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self.path.exists() and os.fstat(descriptor).st_ino == self.path.stat().st_ino:
                    return descriptor
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)  # the previous holder removed the file in between

    def _holder(self) -> str:
        """Describe who wrote the file; empty if nobody did."""
        try:
            content = json.loads(self.path.read_bytes() or b"{}")
            return ", ".join(f"{name} {content[name]}" for name in ("host", "pid", "started") if name in content)
        except (OSError, ValueError, TypeError):
            return f"unknown ({self.path} is damaged)"

    def release(self) -> None:
        """Unlock the folder and remove the lock file."""
        self.path.unlink(missing_ok=True)
        os.close(self._descriptor)
