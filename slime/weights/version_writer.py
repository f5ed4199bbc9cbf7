"""Writing a weight version by several processes at once, and its publication.

    rank 0:       begin_version(...)                       makes the folder of the unfinished version
    every rank:   PartWriter(folder, rank).add(...) ...    its own tensors, into files of its own
    rank 0:       publish_version(...)                     names the files, writes the index, renames the folder

A reader sees nothing before the last rename.  Everything is on disk (fsync) by then, as a network file system needs.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from slime.utils.errors import DataError, WeightSyncError
from slime.weights.hf_files import INDEX_FILE
from slime.weights.named_tensors import tensor_bytes
from slime.weights.versions import remove_version

SHARD_BYTES = 1024**3
"""A file is closed before it grows beyond this: it bounds the host memory of a writer."""


@dataclass(frozen=True, slots=True)
class PartFile:
    """One file of the unfinished version."""

    name: str
    tensors: tuple[str, ...]
    num_bytes: int
    """Of the tensors."""


@contextmanager
def explained_disk_errors(folder: Path, flag: str) -> Iterator[None]:
    """Say which flag leads to the disk that is full or refuses, and what is free there.

    Raises:
        WeightSyncError: in the place of an operating system's error.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        is_full = "No space left" in str(error) or getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
        if not is_full:
            raise WeightSyncError(f"{flag} {folder}: {type(error).__name__}: {error}") from error
        raise WeightSyncError(
            f"{folder} is full ({free_space(folder)}): {error}. Published versions are as they were; make room, or "
            f"point {flag} elsewhere"
        ) from error


def free_space(folder: Path) -> str:
    """Free bytes of the file system, for messages."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return "its free space is unknown"
    return f"{usage.free / 2**30:.2f} GiB of {usage.total / 2**30:.2f} GiB are free"


def require_space(folder: Path, num_bytes: int, flag: str) -> None:
    """Refuse before anything is written when ``num_bytes`` cannot fit.

    Raises:
        WeightSyncError: with what is needed and what is free.
    """
    if shutil.disk_usage(folder).free < num_bytes:
        raise WeightSyncError(
            f"{folder} has no room for {num_bytes / 2**30:.2f} GiB ({free_space(folder)}). Published versions are "
            f"as they were; make room, or point {flag} elsewhere"
        )


def begin_version(final: Path) -> Path:
    """Make the folder in which the version that will be ``final`` is written."""
    folder = final.with_name(f".{final.name}.part-{secrets.token_hex(4)}")
    folder.mkdir(parents=True)
    return folder


class PartWriter:
    """Writes the tensors of one process into files of its own.

    Args:
        folder: of the unfinished version.
        writer: number of this process; no two may share one.
        shard_bytes: a file is closed before it grows beyond this.
    """

    def __init__(self, folder: Path, writer: int, *, shard_bytes: int = SHARD_BYTES) -> None:
        self._folder, self._writer, self._shard_bytes = folder, writer, shard_bytes
        self._pending: dict[str, Tensor] = {}
        self._notes: dict[str, str] = {}
        self._pending_bytes = 0
        self.files: list[PartFile] = []

    def add(self, name: str, tensor: Tensor, *, note: str | None = None) -> None:
        """Take one tensor on the host; ``note`` stands under its name in the file's metadata."""
        size = tensor_bytes(tensor)
        if self._pending and self._pending_bytes + size > self._shard_bytes:
            self.flush()
        self._pending[name] = tensor.detach().contiguous()
        self._pending_bytes += size
        if note is not None:
            self._notes[name] = note

    def flush(self) -> list[PartFile]:
        """Write what is pending; gives the files written so far."""
        if self._pending:
            name = f"part-{self._writer:05d}-{len(self.files):05d}.safetensors"
            path = self._folder / name
            save_file(self._pending, path, metadata={"format": "pt", **self._notes})
            sync_to_disk(path)
            self.files.append(PartFile(name, tuple(self._pending), self._pending_bytes))
            self._pending, self._notes, self._pending_bytes = {}, {}, 0
        return self.files


def publish_version(
    unfinished: Path, final: Path, parts: Sequence[Iterable[PartFile]], metadata: Mapping[str, object], *, first: int
) -> int:
    """Give the files their names, write the index, and rename the folder; a version of the same name is replaced.

    Args:
        unfinished: what :func:`begin_version` made.
        final: its published name.
        parts: the files of every writer.
        metadata: of the index.
        first: number of the first file: 0 for changes, 1 for a whole model.

    Returns:
        bytes of all tensors in the files.

    Raises:
        DataError: two writers wrote the same tensor.
    """
    files = [file for written in parts for file in written]
    weight_map: dict[str, str] = {}
    for number, file in enumerate(files, start=first):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        os.rename(unfinished / file.name, unfinished / name)
        for tensor in file.tensors:
            if tensor in weight_map:
                raise DataError(f"tensor {tensor} was given twice while writing {final}")
            weight_map[tensor] = name
    total = sum(file.num_bytes for file in files)
    index = {"metadata": {"total_size": total, **metadata}, "weight_map": dict(sorted(weight_map.items()))}
    write_atomically(unfinished / INDEX_FILE, json.dumps(index, indent=2) + "\n")
    for path in unfinished.iterdir():
        if not path.name.endswith(".safetensors"):  # those are there already
            sync_to_disk(path)
    sync_to_disk(unfinished)
    if final.exists():
        remove_version(final)
    os.rename(unfinished, final)
    sync_to_disk(final.parent)
    return total


def write_atomically(path: Path, text: str) -> None:
    """The file has its old content or the new one, whatever happens."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text)
    sync_to_disk(temporary)
    os.replace(temporary, path)
    sync_to_disk(path.parent)


def sync_to_disk(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
