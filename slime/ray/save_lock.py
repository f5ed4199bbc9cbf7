"""One job at a time writes what is read back later: ``--save``, the ledger, versions of the weights, exports.

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
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path

from slime.flags.observability import tracking_config
from slime.observability.metrics_file import run_folder
from slime.utils.errors import ConfigError

LOCK_FILE = "job.lock"
logger = logging.getLogger(__name__)


def lock_outputs(args: Namespace, more: Mapping[str, str | Path]) -> list[SaveLock]:
    """Take the locks of everything that this job writes and that a job reads back.

    ``more`` by its flags: a Path is a folder, a text a file or folder that is exchanged as a whole.

    Raises:
        ConfigError: another job holds one of them; no lock is held then.
    """
    folders = {
        "--save": args.save,
        "save of the critic (--megatron-config-path)": args.critic_args.save if args.critic_args is not None else None,
        **{flag: place for flag, place in more.items() if isinstance(place, Path)},
        "--wandb-run-id (the folder of the run)": run_folder(tracking_config(args)),
    }
    outputs = {
        "--save-hf": args.save_hf,
        **{flag: place for flag, place in more.items() if isinstance(place, str)},
        "--save-debug-rollout-data": args.save_debug_rollout_data,
        "--save-debug-train-data": args.save_debug_train_data,
    }
    return lock_folders(folders, outputs)


def lock_folders(folders: Mapping[str, str | Path | None], outputs: Mapping[str, str | None]) -> list[SaveLock]:
    """Take several locks; what two flags name is locked once.

    Args:
        folders: by the flags that name them.
        outputs: files and folders that are exchanged as a whole, maybe with ``{rollout_id}`` in their names.

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
    """Return the file of the lock, in the folder of the first part of the name that changes."""
    folder = os.path.dirname(output.rstrip("/").partition("{")[0])
    return Path(folder, f".{os.path.relpath(output, folder or '.').replace('/', '_')}.lock")


class SaveLock:
    """The right to write to one folder, until :meth:`release` or the end of the process."""

    def __init__(self, folder: str | Path, flag: str = "--save", *, path: Path | None = None) -> None:
        """Take the lock for ``folder``, which ``flag`` names; one that a dead job left behind is taken over.

        ``path`` is the lock's file, by default ``LOCK_FILE`` in the folder; its folder is made when it is missing.

        Raises:
            ConfigError: another job holds it, or the folder cannot be written.
        """
        self.path = path or Path(folder) / LOCK_FILE
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
                f"{flag} {folder} belongs to a job that is running: {self._holder()}. Two jobs would write over each "
                f"other's files; wait for its end, end it, or give another {flag}."
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
