"""Saved states on disk, and the ``tinker://`` paths by which clients name them.

    FOLDER/RUN/run.json                         the model: base, adapter, owner
    FOLDER/RUN/weights/NAME.2/                  a state with Adam's moments, as the backend writes it
    FOLDER/RUN/weights/NAME.2.json              when, for how long, the user's words
    FOLDER/RUN/sampler_weights/NAME.1/          an adapter for sampling

A state is there once its folder is, which appears whole; the newest number of a name counts.  So a state that replaces
another does it in one rename, and what a killed server leaves behind is either whole or not listed.  The listing is
made from disk alone.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from slime.ext.training_api.backend import LoraSpec
from slime.ext.training_api.errors import Refused
from slime.utils.files import write_atomically

logger = logging.getLogger(__name__)

T = TypeVar("T")

TRAINING, SAMPLER = "weights", "sampler_weights"
KINDS = {TRAINING: "training", SAMPLER: "sampler"}
"""Folder of a kind of states -> its name in listings."""
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}", re.ASCII)
_RUN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_:-]{0,127}", re.ASCII)


@dataclass(frozen=True)
class Run:
    """A model that was trained here."""

    run_id: str
    owner: str
    base_model: str
    lora: LoraSpec
    created_at: float
    """Seconds since 1970."""
    user_metadata: dict[str, Any] | None = None


@dataclass(frozen=True)
class State:
    """A saved state."""

    run_id: str
    kind: str
    """One of ``KINDS``."""
    name: str
    folder: Path
    saved_at: float
    expires_at: float | None = None
    user_metadata: dict[str, str] | None = None

    @property
    def checkpoint_id(self) -> str:
        """Its name in the run, with the kind."""
        return f"{self.kind}/{self.name}"

    @property
    def path(self) -> str:
        """The client's name for it."""
        return f"tinker://{self.run_id}/{self.checkpoint_id}"

    def size_bytes(self) -> int:
        """Return what it takes on disk."""
        return sum(file.stat().st_size for file in self.folder.rglob("*") if file.is_file())


def check_name(name: str | None) -> str:
    """Return the name of a state.

    Raises:
        Refused: it could not be one of a folder.
    """
    if name is None or not _NAME.fullmatch(name):
        raise Refused(f"path is {name!r}; a name has 1 to 128 letters, digits, '_', '-' and '.', no '.' in front.")
    return name


class Checkpoints:
    """The states below one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    # --- runs

    def add_run(self, run: Run) -> None:
        """Remember a model."""
        folder = self._folder / run.run_id
        folder.mkdir(exist_ok=True)
        _write(folder / "run.json", asdict(run))

    def run(self, run_id: str, owner: str) -> Run:
        """Return a model of ``owner``.

        Raises:
            Refused: there is none.
        """
        run = self._read_run(run_id)
        if run is None or run.owner != owner:
            raise Refused(f"No training run {run_id[:200]!r} is on this server.", 404)
        return run

    def runs(self, owner: str) -> list[Run]:
        """Return the models of ``owner``, the newest first; those without a state are gone once their client is."""
        found = (self._read_run(folder.name) for folder in self._folder.iterdir())
        runs = [run for run in found if run is not None and run.owner == owner]
        return sorted(runs, key=lambda run: run.created_at, reverse=True)

    def forget_empty_run(self, run_id: str) -> None:
        """Remove a model of which nothing was saved."""
        if not any(self._states_of(run_id)):
            shutil.rmtree(self._folder / run_id, ignore_errors=True)

    def _read_run(self, run_id: str) -> Run | None:
        if not _RUN.fullmatch(run_id):
            return None
        file = self._folder / run_id / "run.json"
        return _read(file, lambda fields: Run(**{**fields, "lora": LoraSpec(**fields["lora"])}))

    # --- states

    def states(self, owner: str, run_id: str | None = None) -> list[State]:
        """Return the states of a run, or all of ``owner``, the newest first."""
        runs = self.runs(owner) if run_id is None else [self.run(run_id, owner)]
        found = [state for run in runs for state in self._states_of(run.run_id)]
        return sorted(found, key=lambda state: state.saved_at, reverse=True)

    def state(self, path: str, owner: str) -> State:
        """Return the state of a ``tinker://`` path.

        Raises:
            Refused: there is none.
        """
        parts = path.removeprefix("tinker://").split("/")
        if not path.startswith("tinker://") or len(parts) != 3:
            raise Refused(f"path is {path[:200]!r}; it must be tinker://RUN/weights/NAME or .../sampler_weights/NAME.")
        self.run(parts[0], owner)
        found = [one for one in self._states_of(parts[0]) if [one.kind, one.name] == parts[1:]]
        if not found:
            raise Refused(f"{path[:200]} is not on this server; it was never saved, has expired, or was deleted.", 404)
        return found[0]

    def next_place(self, run_id: str, kind: str, name: str, *, overwrite: bool) -> State:
        """Return where a new state goes; its folder is not there yet.

        Raises:
            Refused: the name is taken.
        """
        parent = self._folder / run_id / kind
        parent.mkdir(parents=True, exist_ok=True)
        numbers = [number for number, _ in _numbered(parent, name)]
        if not overwrite and any(one.kind == kind and one.name == name for one in self._states_of(run_id)):
            raise Refused(f"tinker://{run_id}/{kind}/{name} is there already; give another name, or overwrite=True.")
        return State(run_id, kind, name, parent / f"{name}.{max(numbers, default=0) + 1}", time.time())

    def announce(self, state: State) -> None:
        """Write what is to be known of a state, before its folder appears."""
        fields = {"saved_at": state.saved_at, "expires_at": state.expires_at, "user_metadata": state.user_metadata}
        _write(state.folder.with_name(state.folder.name + ".json"), fields)

    def drop_replaced(self, state: State) -> None:
        """Remove the earlier states of the same name."""
        for _, folder in _numbered(state.folder.parent, state.name):
            if folder != state.folder:
                _remove(folder)

    def delete(self, state: State) -> None:
        """Remove a state, with the earlier ones of its name."""
        for _, folder in sorted(_numbered(state.folder.parent, state.name)):  # the newest, which counts, last
            _remove(folder)

    def set_expiry(self, state: State, ttl_s: int | None) -> None:
        """Let a state expire in ``ttl_s`` seconds; None: never."""
        self.announce(replace(state, expires_at=None if ttl_s is None else time.time() + ttl_s))

    def delete_expired(self, now: float) -> None:
        """Remove what has expired; ``now`` in seconds since 1970."""
        for run in self._folder.iterdir():
            for state in self._states_of(run.name, with_expired=True):
                if state.expires_at is not None and state.expires_at <= now:
                    try:
                        self.delete(state)
                    except OSError:  # the disk may take it the next time; the others go now
                        logger.exception("%s has expired and was not deleted.", state.path)

    def _states_of(self, run_id: str, *, with_expired: bool = False) -> Iterator[State]:
        for kind in KINDS:
            parent = self._folder / run_id / kind
            names = {file.stem.rpartition(".")[0] for file in parent.glob("*.json")} if parent.is_dir() else set()
            for name in sorted(names):
                whole = [(number, folder) for number, folder in _numbered(parent, name) if folder.is_dir()]
                if not whole:
                    continue
                _, folder = max(whole)
                file = folder.with_name(folder.name + ".json")
                state = _read(file, partial(_state, run_id, kind, name, folder))
                if state is None:
                    continue
                if with_expired or state.expires_at is None or state.expires_at > time.time():
                    yield state


def _state(run_id: str, kind: str, name: str, folder: Path, fields: dict[str, Any]) -> State:
    return State(run_id, kind, name, folder, **fields)


def _numbered(parent: Path, name: str) -> list[tuple[int, Path]]:
    """Return number and folder of every state of a name, those without a folder too."""
    found = []
    for file in parent.glob("*.json"):
        stem, _, number = file.stem.rpartition(".")
        if stem == name and number.isdecimal():
            found.append((int(number), file.with_suffix("")))
    return found


def _remove(folder: Path) -> None:
    """Remove a state: it is gone with the rename."""
    trash = folder.with_name(f".{folder.name}.deleted")
    if folder.is_dir():
        shutil.rmtree(trash, ignore_errors=True)
        os.rename(folder, trash)
        shutil.rmtree(trash, ignore_errors=True)
    folder.with_name(folder.name + ".json").unlink(missing_ok=True)


def _write(file: Path, fields: dict[str, Any]) -> None:
    text = json.dumps(fields).encode()
    write_atomically(file, lambda out: out.write(text), what="A checkpoint's description", flag="--training-api-dir")


def _read(file: Path, make: Callable[[dict[str, Any]], T]) -> T | None:
    try:
        return make(json.loads(file.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, LookupError) as error:
        logger.warning("%s is left out: it cannot be read: %s", file, error)
        return None
