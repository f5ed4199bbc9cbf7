"""File operations at their seams: each may fail, be the last act of its process, or be done partly."""

from __future__ import annotations

import errno
import functools
import os
import pathlib
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.simulator.kernel import _KERNEL, Process
from tests.simulator.oracles import Checkpoints


class Files:
    """The disk of one schedule: a real folder in memory."""

    def __init__(self, world: Any, folder: Path) -> None:
        self.world, self.prefix = world, str(folder)
        self.full_until_s = 0.0
        self._checkpoints = Checkpoints(world)
        self.locks: dict[str, Process] = {}
        self.descriptors: dict[int, str] = {}
        """Open files of simulated processes, which do not close them when killed."""

    def close(self) -> None:
        for descriptor in list(self.descriptors):
            os.close(descriptor)

    def at(self, what: str, path: str, *, half: Callable[[], None] | None = None) -> str | None:
        """Pass a point at which a fault may strike: before the operation, in its middle, or (returned) after it."""
        world = self.world
        process = world.kernel.current_process
        self._checkpoints.check(what, path)
        outcome = world.at(
            f"file {world.cluster.role_of(process)} {what} {name_of_site(os.path.basename(path))}", process
        )
        if outcome == "half":
            if half is not None:
                half()
            world.note(f"{process} is killed in the middle of {what} {os.path.basename(path)}")
            process.kill()
        if outcome == "ioerror":
            raise OSError(errno.EIO, "Input/output error", path)
        if world.kernel.now_s < self.full_until_s and what in ("write", "sync", "make"):
            raise OSError(errno.ENOSPC, "No space left on device", path)
        return outcome

    def write(self, path: Path, content: bytes) -> None:
        """Write a whole file, as the writers of checkpoints do."""
        self.at("write", str(path), half=lambda: _append(path, content[: len(content) // 2]))
        path.write_bytes(content)
        if self.at("written", str(path)) == "after":
            self.world.kernel.current_process.kill()

    def sync(self, path: str) -> None:
        """Wait for the disk; others may die meanwhile."""
        self.at("sync", path)
        kernel = self.world.kernel
        kernel.sleep(kernel.draw("disk", 0.001, 2.0))


@functools.lru_cache(maxsize=4096)
def name_of_site(name: str) -> str:
    """Return the common part of the names of files of one kind."""
    return re.sub(r"[0-9a-f]*\d+", "#", name).removesuffix(".tmp")


def _append(path: Path, content: bytes) -> None:
    with open(path, "ab") as file:
        file.write(content)


def _is_simulated() -> Any:
    kernel = _KERNEL[0]
    return kernel is not None and not kernel.is_over and kernel.current is not None


def patch_files(patches: Any, files: Callable[[], Files]) -> None:  # noqa: C901 - a function for each seam
    from slime.ray.save_lock import SaveLock

    real_open, real_close, real_write = os.open, os.close, os.write
    real_replace, real_rmtree, real_rename = pathlib.Path.replace, shutil.rmtree, pathlib.Path.rename

    def is_ours(path: Any) -> bool:
        return _is_simulated() and str(path).startswith(files().prefix)

    def fake_open(path: Any, flags: int, mode: int = 0o777, **keywords: Any) -> int:
        if not is_ours(path):
            return real_open(path, flags, mode, **keywords)
        if flags & os.O_CREAT:
            files().at("make", str(path))
        descriptor = real_open(path, flags, mode, **keywords)
        if not flags & os.O_NONBLOCK:  # the reader of outside files passes it to a file object, which closes it
            files().descriptors[descriptor] = str(path)
        return descriptor

    def fake_close(descriptor: int) -> None:
        if _KERNEL[0] is not None:
            known = files().descriptors.pop(descriptor, None)
            if known is None and _KERNEL[0].is_over:
                return
        real_close(descriptor)

    def fake_write(descriptor: int, data: Any) -> int:
        if _is_simulated() and (path := files().descriptors.get(descriptor)):
            size = len(data)
            files().at("write", path, half=lambda: real_write(descriptor, bytes(data[: size // 2])))
            written = real_write(descriptor, data)
            return written
        return real_write(descriptor, data)

    def fake_fsync(descriptor: int) -> None:
        if not _is_simulated():
            return
        files().sync(os.readlink(f"/proc/self/fd/{descriptor}"))

    def moved(real: Any) -> Any:
        def move(path: Path, target: Any) -> Any:
            if not is_ours(path):
                return real(path, target)
            files().at("replace", str(target))
            result = real(path, target)
            if files().at("replaced", str(target)) == "after":
                files().world.kernel.current_process.kill()
            return result

        return move

    def fake_rmtree(path: Any, *args: Any, **keywords: Any) -> None:
        if is_ours(path):

            def half() -> None:
                for child in sorted(Path(path).iterdir())[::2]:
                    child.unlink()

            files().at("remove", str(path), half=half)
        real_rmtree(path, *args, **keywords)

    def take_lock(lock: SaveLock) -> int:
        process = _KERNEL[0].current_process  # type: ignore[union-attr]
        holder = files().locks.get(str(lock.path))
        if holder is not None and holder.is_alive:
            raise BlockingIOError
        files().locks[str(lock.path)] = process  # type: ignore[assignment]
        return os.open(lock.path, os.O_RDWR | os.O_CREAT, 0o644)

    real_path_open = pathlib.Path.open

    def fake_path_open(path: Path, mode: str = "r", *args: Any, **keywords: Any) -> Any:
        if "w" not in mode or not is_ours(path):
            return real_path_open(path, mode, *args, **keywords)
        files().at("make", str(path))
        file = real_path_open(path, mode, *args, **keywords)
        if files().at("made", str(path)) == "after":
            files().world.kernel.current_process.kill()
        return file

    patches.set(pathlib.Path, "open", fake_path_open)
    patches.set(os, "open", fake_open)
    patches.set(os, "close", fake_close)
    patches.set(os, "write", fake_write)
    patches.set(os, "fsync", fake_fsync)
    patches.set(pathlib.Path, "replace", moved(real_replace))
    patches.set(pathlib.Path, "rename", moved(real_rename))
    patches.set(shutil, "rmtree", fake_rmtree)
    patches.set(SaveLock, "_open", take_lock)
