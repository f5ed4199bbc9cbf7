"""The folder that a conversion writes: whose it is, what is finished in it, and whether the rest fits the disk.

While a conversion is under way the folder holds its journal, ``.conversion.json``: the settings, and names, sizes and
times of the source's files.  No other conversion continues it, and nobody takes it for a model: config.json
and the index come last.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slime.ext.low_precision.folders.plan import CONFIG_FILE, FilePlan, HfSource, make_index
from slime.utils.errors import ConfigError
from slime.utils.files import read_object, sync_to_disk
from slime.weights.file_digests import DIGEST_FILE, FolderDigests, Piece, digest_of, pieces_of_file
from slime.weights.hf_files import INDEX_FILE, PARTIAL_SUFFIX, is_weight_file

JOURNAL = ".conversion.json"
LOCK = ".conversion.lock"
DIGESTS_SUFFIX = ".digests"
"""Of a hidden file with the digests of a finished shard, while others are not."""
RESERVE_BYTES = 64 * 1024**2
"""Left free on the disk."""


class Target:
    """One folder, held by this process while :meth:`held` is open."""

    def __init__(self, folder: str | Path, source: HfSource, plans: list[FilePlan]) -> None:
        self.folder = Path(folder)
        self._source = source
        self._plans = plans
        if self.folder.resolve() == source.folder.resolve():
            raise ConfigError(f"the model cannot be written over its own source {folder}; choose another folder")

    @contextmanager
    def held(self, settings: Mapping[str, Any], *, overwrite: bool, is_shared: bool) -> Iterator[None]:
        """Take the folder, begin or take up the journal, and clear what an interrupted run left half-written.

        Args:
            overwrite: remove a model or another conversion that is there.

        Raises:
            ConfigError: the folder is another's, in use, or holds something else.
        """
        if self.folder.exists() and not self.folder.is_dir():
            raise ConfigError(f"{self.folder} is a file; give a folder")
        self._require_space(overwrite)
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / LOCK, "w") as lock:
            try:
                fcntl.flock(lock, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            except OSError as error:
                raise ConfigError(
                    f"another process converts into {self.folder}; wait for it or choose another folder"
                ) from error
            try:
                self._take_over(settings, overwrite)
                if not is_shared:
                    for path in self.folder.glob(f".*{PARTIAL_SUFFIX}"):
                        path.unlink()
                yield
            finally:
                is_under_way = (self.folder / JOURNAL).exists()
                if not is_shared or not is_under_way:
                    (self.folder / LOCK).unlink(missing_ok=True)

    def is_finished(self, plan: FilePlan) -> bool:
        """Return True when a shard is complete: its size and its header are those planned.

        A file gets its name only after its last byte has reached the disk.
        """
        path = self.folder / plan.name
        if not path.is_file() or path.stat().st_size != plan.file_bytes:
            return False
        with open(path, "rb") as file:
            return file.read(len(plan.header)) == plan.header

    def add_digests(self, name: str, written: Path) -> None:
        """Note the digests of a shard that is about to get its name."""
        write_json(self._digests_path(name), pieces_of_file(written))

    def _digests_path(self, name: str) -> Path:
        return self.folder / f".{name}{DIGESTS_SUFFIX}"

    def _digests_of(self, name: str) -> list[Piece]:
        noted = self._digests_path(name)
        return json.loads(noted.read_text()) if noted.is_file() else pieces_of_file(self.folder / name)

    def close(self, config: dict[str, Any]) -> None:
        """Make the folder a model: assets, config, digests and, last of all, the index."""
        for path in self._assets():
            temporary = partial_path(self.folder / path.name)
            shutil.copyfile(path, temporary)
            sync_to_disk(temporary)
            os.replace(temporary, self.folder / path.name)
        write_json(self.folder / CONFIG_FILE, config)
        index = to_json(make_index(self._plans))
        pieces = {plan.name: self._digests_of(plan.name) for plan in self._plans}
        digests = FolderDigests(self.folder, pieces | {INDEX_FILE: [(0, len(index), digest_of(index))]})
        write_file(self.folder / DIGEST_FILE, digests.to_bytes())
        write_file(self.folder / INDEX_FILE, index)
        for name in (JOURNAL, *(self._digests_path(plan.name).name for plan in self._plans)):
            (self.folder / name).unlink(missing_ok=True)

    def _assets(self) -> list[Path]:
        return [
            path
            for path in sorted(self._source.folder.iterdir())
            if path.is_file() and not is_weight_file(path.name) and path.name not in (CONFIG_FILE, JOURNAL, LOCK)
        ]

    def _take_over(self, settings: Mapping[str, Any], overwrite: bool) -> None:
        journal = self.folder / JOURNAL
        wanted = {"settings": dict(settings), "source": self._fingerprint()}
        wanted = json.loads(json.dumps(wanted))
        found = read_object(journal, remedy="Delete it and repeat the command.") if journal.is_file() else None
        if found == wanted:
            return
        if overwrite:
            self._clear()
            write_json(journal, wanted)
            return
        if found is not None:
            part = "settings" if found.get("settings") != wanted["settings"] else "source"
            raise ConfigError(
                f"{self.folder} holds an unfinished conversion with other {part}"
                + (f" ({found.get('settings')}; now {wanted['settings']})" if part == "settings" else "")
                + "; repeat that command, choose another folder, or pass --overwrite to start over"
            )
        # A partial journal belongs to a machine that begins at this moment, or to a process killed when it did.
        names = sorted(path.name for path in self.folder.iterdir())
        others = [name for name in names if name != LOCK and not name.startswith(f"{JOURNAL}.")]
        if others:
            what = "holds a model" if INDEX_FILE in others else f"is not empty ({', '.join(others[:3])})"
            raise ConfigError(f"{self.folder} {what}; choose another folder, or pass --overwrite to replace it")
        write_json(journal, wanted)

    def _fingerprint(self) -> dict[str, list[int]]:
        found = {}
        for name in (CONFIG_FILE, *self._source.shards):
            state = (self._source.folder / name).stat()
            found[name] = [state.st_size, state.st_mtime_ns]
        return found

    def _clear(self) -> None:
        # The index goes first: from then on nobody takes what is left for a model.
        for path in sorted(self.folder.iterdir(), key=lambda path: path.name != INDEX_FILE):
            if self._is_replaced(path):
                path.unlink()

    def _is_replaced(self, path: Path) -> bool:
        is_ours = path.name in (CONFIG_FILE, JOURNAL) or path.name.endswith(DIGESTS_SUFFIX)
        return path.is_file() and (is_ours or is_weight_file(path.name))

    def _require_space(self, overwrite: bool) -> None:
        shards = sum(plan.file_bytes for plan in self._plans if overwrite or not self.is_finished(plan))
        needed = shards + sum(path.stat().st_size for path in self._assets()) + RESERVE_BYTES
        place = self.folder
        while not place.exists():
            place = place.absolute().parent
        free = shutil.disk_usage(place).free
        if overwrite and self.folder.is_dir():
            free += sum(path.stat().st_size for path in self.folder.iterdir() if self._is_replaced(path))
        if needed > free:
            raise ConfigError(
                f"{self.folder} needs {needed / 2**30:.2f} GiB more, its disk has {free / 2**30:.2f} GiB free; "
                "free some space or choose another disk"
            )


def partial_path(path: Path) -> Path:
    """Return an unused path at which a file is written before it is renamed to ``path``."""
    return path.with_name(f".{path.name.lstrip('.')}.{secrets.token_hex(4)}{PARTIAL_SUFFIX}")


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file so that it is there in full or not at all."""
    write_file(path, to_json(content))


def to_json(content: Any) -> bytes:
    """Return a value as the text of a file."""
    return (json.dumps(content, indent=2) + "\n").encode()


def write_file(path: Path, content: bytes) -> None:
    """Write a file so that it is there in full or not at all, whoever else writes it meanwhile."""
    temporary = partial_path(path)
    with open(temporary, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_to_disk(path.parent)
