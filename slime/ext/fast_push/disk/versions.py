"""Weight versions in a shared folder: names, content, how to get from one version to another, and writing.

    {root}/weight_v000007/           version 7: a full model, or a delta relative to its base version
    {root}/weight_v000007-full/      a full copy of version 7, for readers that cannot apply the deltas
    {root}/.weight_v000008.part-.../ a version being written; a rename finalizes it

Version 0 is the model that the engines started from, in its own folder.  A *chain* is the sequence of versions that
one run writes, each of whose deltas needs the version before.  Its random id is stored with every version, because
versions of two runs may have equal numbers and different weights.

Several processes write a version:

    rank 0:       begin_version(...)                       creates the folder of the unfinished version
    every rank:   PartWriter(folder, rank).add(...) ...    writes its own tensors into its own files
    rank 0:       finalize_version(...)                    names the files, writes the index, renames the folder

Readers see nothing before the last rename.  By then every file has been synced to disk (fsync), as network file
systems require.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor

from slime.ext.fast_push.disk.delta import COMPRESSION, ENCODINGS
from slime.utils.errors import DataError, WeightSyncError
from slime.utils.files import parse_object, read_outside_file, replace_file, sync_to_disk
from slime.weights.hf_files import INDEX_FILE
from slime.weights.named_tensors import tensor_bytes
from slime.weights.stored_tensors import save_tensors

PREFIX = "weight_v"
WHOLE_SUFFIX = "-full"
_NAME = re.compile(rf"^{PREFIX}(\d{{6,}})({WHOLE_SUFFIX})?$")
_PART = re.compile(rf"^\.{PREFIX}(\d{{6,}}).*\.part-")
CHAIN = "chain"
"""Key of the chain's id in the metadata of a version's index."""


def version_text(number: int) -> str:
    """Format a version number as six digits, as used in indexes and state files."""
    return f"{number:06d}"


def version_folder(root: str | Path, number: int, *, whole: bool = False) -> Path:
    """Return the folder of version ``number``; with ``whole``, the folder of the full copy beside a delta."""
    return Path(root) / f"{PREFIX}{version_text(number)}{WHOLE_SUFFIX if whole else ''}"


@dataclass(frozen=True, slots=True)
class Version:
    """One finalized version."""

    number: int
    folder: Path
    chain: str
    """Id of the chain that the version belongs to."""
    base: int | None = None
    """The version that this delta is relative to; None for a full model."""
    encoding: str = ""
    checksum: str = ""

    @property
    def is_whole(self) -> bool:
        """True for a full model, False for a delta."""
        return self.base is None


def read_version(folder: Path) -> Version:
    """Return the version in ``folder``, from the metadata of its index.

    Raises:
        WeightSyncError: the index is missing, names another version, or has an unknown format.
    """
    match = _NAME.match(folder.name)
    if match is None:
        raise WeightSyncError(f"{folder} is not a weight version; versions are named {PREFIX}000001 and so on")
    index = folder / INDEX_FILE
    try:
        metadata = parse_object(read_outside_file(index))["metadata"]
        number, chain = int(match[1]), str(metadata.get(CHAIN, ""))
        if "delta_encoding" not in metadata:
            return Version(number, folder, chain)
        version = Version(
            number,
            folder,
            chain,
            base=int(metadata["base_version"]),
            encoding=metadata["delta_encoding"],
            checksum=metadata["checksum_format"],
        )
        told, compression = int(metadata["version"]), metadata["compression_format"]
        if not 0 <= int(metadata["base_version"]) < number or not isinstance(version.checksum, str):
            raise ValueError(f"base {metadata['base_version']}, checksums {version.checksum!r}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightSyncError(f"{index} does not describe a weight version: {error!r}") from error
    if told != number or version.encoding not in ENCODINGS or compression != COMPRESSION:
        raise WeightSyncError(
            f"{index} says version {told}, encoding {version.encoding!r}, compression {compression!r}; expected "
            f"{number}, one of {ENCODINGS}, {COMPRESSION!r}"
        )
    return version


def list_folders(root: str | Path) -> list[Path]:
    """Return the folders of finalized versions, including full copies, sorted by number."""
    found = [(int(match[1]), path.name, path) for path in _entries(root) if (match := _NAME.match(path.name))]
    return [path for _, _, path in sorted(found)]


def _entries(root: str | Path) -> list[Path]:
    """Return the entries of ``root``; listing a folder also makes a network file system refresh its cache."""
    try:
        return list(Path(root).iterdir())
    except FileNotFoundError:
        return []


@dataclass(frozen=True, slots=True)
class Route:
    """How to reach a version: what to copy first, if anything, and which deltas to apply then, in order."""

    seed: Version | None
    """The full version to start from; None to start from the held version or from the model."""
    from_model: bool
    """Start from the model that is version 0."""
    deltas: tuple[Version, ...]


def find_route(root: str | Path, target: int, held: tuple[int, str] | None) -> Route:
    """Return the route to version ``target``: from the held version if possible, else from the newest full version.

    Args:
        held: number and chain of the local version; None if there is none that can be trusted.

    Raises:
        WeightSyncError: versions on the route are missing, or ``target`` is older than the held version of its chain.
    """
    if target == 0:
        is_there = held is not None and held[0] == 0
        return Route(None, from_model=not is_there, deltas=())
    chain: str | None = None
    number, deltas = target, list[Version]()
    whole: tuple[Version, int] | None = None
    """The newest full version found on the way back, and the number of deltas after it."""
    while number:
        found = [read_version(path) for path in _finalized(root, number)]
        chain = found[0].chain if chain is None and found else chain
        found = [version for version in found if version.chain == chain]
        if held is not None and held[0] == number and held[1] == chain:
            return Route(None, from_model=False, deltas=tuple(reversed(deltas)))
        if whole is None:
            whole = next(((version, len(deltas)) for version in found if version.is_whole), None)
        delta = next((version for version in found if not version.is_whole), None)
        if delta is None:
            break
        assert delta.base is not None, delta.folder
        deltas.append(delta)
        number = delta.base
    if held is not None and held[1] == chain and held[0] > target:
        raise WeightSyncError(
            f"version {target} was requested, but version {held[0]} is held already; versions are applied in order"
        )
    if number == 0 and held is not None and held[0] == 0:
        return Route(None, from_model=False, deltas=tuple(reversed(deltas)))
    if whole is not None:
        seed, num_after = whole
        return Route(seed, from_model=False, deltas=tuple(reversed(deltas[:num_after])))
    if number == 0:
        return Route(None, from_model=True, deltas=tuple(reversed(deltas)))
    present = ", ".join(path.name for path in list_folders(root)) or "no versions"
    raise WeightSyncError(
        f"version {target} cannot be reached from {describe_held(held)}: {version_folder(root, number).name} is "
        f"missing in {root}, which holds {present}"
    )


def describe_held(held: tuple[int, str] | None) -> str:
    """Describe the held version, for messages."""
    return "nothing" if held is None else f"version {held[0]}"


def _finalized(root: str | Path, number: int) -> list[Path]:
    candidates = (version_folder(root, number), version_folder(root, number, whole=True))
    return [folder for folder in candidates if (folder / INDEX_FILE).exists()]


def remove_version(folder: Path) -> None:
    """Remove one version atomically: readers see all of it or nothing.  Does nothing if it does not exist."""
    # The random suffix avoids an earlier version of that name, which persists while a reader has it open.
    trash = folder.with_name(f".{folder.name}.part-{secrets.token_hex(4)}")
    try:
        folder.rename(trash)
    except FileNotFoundError:
        return
    shutil.rmtree(trash, ignore_errors=True)


def remove_all(root: str | Path) -> None:
    """Remove every version, finalized or not; other files in the folder stay."""
    prune_before(root, math.inf)


def prune_before(root: str | Path, number: float) -> None:
    """Remove every version older than ``number``, including unfinished ones that dead writers left."""
    for path in _entries(root):
        if (match := _PART.match(path.name)) and int(match[1]) < number:
            shutil.rmtree(path, ignore_errors=True)
        elif (match := _NAME.match(path.name)) and int(match[1]) < number:
            remove_version(path)


# Writing

SHARD_BYTES = 1024**3
"""Maximum bytes of one file; bounds a writer's host memory."""


@dataclass(frozen=True, slots=True)
class PartFile:
    """One file of the unfinished version."""

    name: str
    tensors: tuple[str, ...]
    num_bytes: int
    """Bytes of the tensors."""


@contextmanager
def explained_disk_errors(folder: Path, flag: str) -> Iterator[None]:
    """Turn an operating system's error into one that names the flag, the folder and the free space.

    Raises:
        WeightSyncError: the body raised an OSError or a SafetensorError.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        is_full = "No space left" in str(error) or getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
        if not is_full:
            raise WeightSyncError(f"{flag} {folder}: {type(error).__name__}: {error}") from error
        raise WeightSyncError(
            f"{folder} is full ({free_space(folder)}): {error}. Finalized versions are intact; free some space, or "
            f"point {flag} elsewhere"
        ) from error


def free_space(folder: Path) -> str:
    """Describe the free space of the file system, for messages."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return "free space unknown"
    return f"{usage.free / 2**30:.2f} GiB of {usage.total / 2**30:.2f} GiB are free"


def require_space(folder: Path, num_bytes: int, flag: str) -> None:
    """Check, before anything is written, that ``num_bytes`` fit into the file system.

    Raises:
        WeightSyncError: they do not; the message gives the needed and the free space.
    """
    if shutil.disk_usage(folder).free < num_bytes:
        raise WeightSyncError(
            f"{folder} has no room for {num_bytes / 2**30:.2f} GiB ({free_space(folder)}). Finalized versions are "
            f"intact; free some space, or point {flag} elsewhere"
        )


def begin_version(final: Path) -> Path:
    """Create the folder in which the version is written that will become ``final``."""
    folder = final.with_name(f".{final.name}.part-{secrets.token_hex(4)}")
    folder.mkdir(parents=True)
    return folder


class PartWriter:
    """Writes the tensors of one process into its own files."""

    def __init__(self, folder: Path, writer: int, *, shard_bytes: int = SHARD_BYTES) -> None:
        self._folder, self._writer, self._shard_bytes = folder, writer, shard_bytes
        self._pending: dict[str, Tensor] = {}
        self._notes: dict[str, str] = {}
        self._pending_bytes = 0
        self.files: list[PartFile] = []

    def add(self, name: str, tensor: Tensor, *, note: str | None = None) -> None:
        """Queue one tensor, copied to the host by the caller; ``note`` goes into the file's metadata under its
        name."""
        size = tensor_bytes(tensor)
        if self._pending and self._pending_bytes + size > self._shard_bytes:
            self.flush()
        self._pending[name] = tensor.detach().contiguous()
        self._pending_bytes += size
        if note is not None:
            self._notes[name] = note

    def flush(self) -> list[PartFile]:
        """Write pending tensors; return the files written so far."""
        if self._pending:
            name = f"part-{self._writer:05d}-{len(self.files):05d}.safetensors"
            path = self._folder / name
            save_tensors(path, self._pending, self._notes)
            sync_to_disk(path)
            self.files.append(PartFile(name, tuple(self._pending), self._pending_bytes))
            self._pending, self._notes, self._pending_bytes = {}, {}, 0
        return self.files


def finalize_version(
    unfinished: Path, final: Path, parts: Sequence[Iterable[PartFile]], metadata: Mapping[str, object], *, first: int
) -> None:
    """Name the files, write the index, and rename the folder.  Replaces a version of the same name.

    Args:
        unfinished: the folder that :func:`begin_version` created.
        first: number of the first file: 0 for a delta, 1 for a full model.

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
                raise DataError(f"tensor {tensor} was written twice in {final}")
            weight_map[tensor] = name
    total = sum(file.num_bytes for file in files)
    index = {"metadata": {"total_size": total, **metadata}, "weight_map": dict(sorted(weight_map.items()))}
    text = json.dumps(index, indent=2) + "\n"
    replace_file(unfinished / INDEX_FILE, lambda file: file.write(text.encode()))
    for path in unfinished.iterdir():
        if not path.name.endswith(".safetensors"):  # PartWriter has synced those
            sync_to_disk(path)
    sync_to_disk(unfinished)
    if final.exists():
        remove_version(final)
    os.rename(unfinished, final)
    sync_to_disk(final.parent)
