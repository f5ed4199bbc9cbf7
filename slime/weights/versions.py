"""Weight versions in a shared folder: their names, what they are made of, and the way from one to another.

    {root}/weight_v000007/           version 7: a whole model, or what changed since its base version
    {root}/weight_v000007-full/      version 7 once more, whole, so that a reader need not follow the changes
    {root}/.weight_v000008.part-…/   being written; a rename publishes it

Version 0 is the model that the engines started from, which lies elsewhere.  Whoever reads a folder of this name reads
a complete version.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from slime.utils.errors import WeightSyncError
from slime.weights.delta import COMPRESSION, ENCODINGS
from slime.weights.hf_files import INDEX_FILE

PREFIX = "weight_v"
WHOLE_SUFFIX = "-full"
_NAME = re.compile(rf"^{PREFIX}(\d{{6,}})({WHOLE_SUFFIX})?$")
_PART = re.compile(rf"^\.{PREFIX}\d{{6,}}.*\.part-")
CHAIN = "chain"
"""Key of the index's metadata: the run of pushes that a version belongs to.  Versions of two runs may have the same
numbers and other weights."""


def version_text(number: int) -> str:
    """Six digits, as indexes and state files have it."""
    return f"{number:06d}"


def version_folder(root: str | Path, number: int, *, whole: bool = False) -> Path:
    """Where version ``number`` lies; ``whole``: the additional whole copy of a version that is a delta."""
    return Path(root) / f"{PREFIX}{version_text(number)}{WHOLE_SUFFIX if whole else ''}"


@dataclass(frozen=True, slots=True)
class Version:
    """One published version."""

    number: int
    folder: Path
    chain: str
    base: int | None = None
    """The version that this one changes; None for a whole model."""
    encoding: str = ""
    checksum: str = ""

    @property
    def is_whole(self) -> bool:
        return self.base is None


def read_version(folder: Path) -> Version:
    """The version in ``folder``, from the metadata of its index.

    Raises:
        WeightSyncError: the index is missing, or speaks of another version, or of a format that is not known.
    """
    match = _NAME.match(folder.name)
    if match is None:
        raise WeightSyncError(f"{folder} is no weight version; their names are {PREFIX}000001 and so on")
    index = folder / INDEX_FILE
    try:
        metadata = json.loads(index.read_text())["metadata"]
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
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WeightSyncError(f"{index} does not describe a weight version: {error!r}") from error
    if told != number or version.encoding not in ENCODINGS or compression != COMPRESSION:
        raise WeightSyncError(
            f"{index} says version {told}, encoding {version.encoding!r}, compression {compression!r}; expected "
            f"{number}, one of {ENCODINGS}, {COMPRESSION!r}"
        )
    return version


def list_folders(root: str | Path) -> list[Path]:
    """Folders of published versions, whole copies included, by number."""
    found = [(int(match[1]), path.name, path) for path in _entries(root) if (match := _NAME.match(path.name))]
    return [path for _, _, path in sorted(found)]


def _entries(root: str | Path) -> list[Path]:
    """What lies in ``root``; a listing also makes a network file system look again."""
    try:
        return list(Path(root).iterdir())
    except FileNotFoundError:
        return []


@dataclass(frozen=True, slots=True)
class Route:
    """How to come to a version: what to copy first, if anything, and which changes to apply then, in order."""

    seed: Version | None
    """The whole version to start from; None to start from what is held, or from the model."""
    from_model: bool
    """Start from the model that is version 0."""
    deltas: tuple[Version, ...]


def find_route(root: str | Path, target: int, held: tuple[int, str] | None) -> Route:
    """The way to version ``target``: from what is held where that is possible, else from the newest whole version.

    Args:
        root: the folder of versions.
        target: where to arrive; 0 is the model itself.
        held: number and chain of the version at hand; None when there is none that can be trusted.

    Raises:
        WeightSyncError: versions on the way are missing; ``target`` is older than what is held of the same chain.
    """
    if target == 0:
        is_there = held is not None and held[0] == 0
        return Route(None, from_model=not is_there, deltas=())
    chain: str | None = None
    number, deltas = target, list[Version]()
    whole: tuple[Version, int] | None = None
    """The newest whole version on the way back, and how many changes lie behind it."""
    while number:
        found = [read_version(path) for path in _published(root, number)]
        chain = found[0].chain if chain is None and found else chain
        found = [version for version in found if version.chain == chain]
        if held is not None and held[0] == number and held[1] == chain:
            return Route(None, from_model=False, deltas=tuple(reversed(deltas)))
        if whole is None:
            whole = next(((version, len(deltas)) for version in found if version.is_whole), None)
        delta = next((version for version in found if not version.is_whole), None)
        if delta is None:
            break
        if not (delta.base is not None and 0 <= delta.base < number):
            raise WeightSyncError(f"{delta.folder} says that it changes version {delta.base}; it must be an older one")
        deltas.append(delta)
        number = delta.base
    if held is not None and held[1] == chain and held[0] > target:
        raise WeightSyncError(
            f"version {target} was asked for, and version {held[0]} is held already; versions are applied in order"
        )
    if number == 0 and held is not None and held[0] == 0:
        return Route(None, from_model=False, deltas=tuple(reversed(deltas)))
    if whole is not None:
        seed, num_after = whole
        return Route(seed, from_model=False, deltas=tuple(reversed(deltas[:num_after])))
    if number == 0:
        return Route(None, from_model=True, deltas=tuple(reversed(deltas)))
    present = ", ".join(path.name for path in list_folders(root)) or "no version at all"
    raise WeightSyncError(
        f"version {target} cannot be reached from {describe_held(held)}: {version_folder(root, number).name} is "
        f"missing in {root}, which has {present}"
    )


def describe_held(held: tuple[int, str] | None) -> str:
    """For messages."""
    return "nothing" if held is None else f"version {held[0]}"


def _published(root: str | Path, number: int) -> list[Path]:
    candidates = (version_folder(root, number), version_folder(root, number, whole=True))
    return [folder for folder in candidates if (folder / INDEX_FILE).exists()]


def remove_version(folder: Path) -> None:
    """Take one version away; a reader sees it whole or not at all.  What is gone already is fine."""
    trash = folder.with_name(f".{folder.name}.part-removed")
    shutil.rmtree(trash, ignore_errors=True)
    try:
        folder.rename(trash)
    except FileNotFoundError:
        return
    shutil.rmtree(trash, ignore_errors=True)


def remove_all(root: str | Path) -> None:
    """Take away every version and every unfinished one; other files of the folder stay."""
    for folder in list_folders(root):
        remove_version(folder)
    for path in _entries(root):
        if _PART.match(path.name):
            shutil.rmtree(path, ignore_errors=True)


def prune_before(root: str | Path, number: int) -> list[int]:
    """Remove every version older than ``number``; gives their numbers."""
    removed = []
    for folder in list_folders(root):
        match = _NAME.match(folder.name)
        if match is not None and int(match[1]) < number:
            remove_version(folder)
            removed.append(int(match[1]))
    return removed
