"""A host's local copy of the model, updated from version to version by the deltas in a shared folder.

One copy serves all engines of a host; the first engine that asks does the work, under a file lock.  The state file
records the version of the copy.  It says "dirty" from before the first byte changes until everything is verified and
on
disk: if the process is killed in between, the copy is recreated, never served.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from slime.backends.sglang_utils.weight_verbs import WeightVerbs
from slime.ext.fast_push.disk.delta import apply_delta
from slime.ext.fast_push.disk.versions import (
    Version,
    describe_held,
    explained_disk_errors,
    find_route,
    list_folders,
    version_folder,
    version_text,
)
from slime.utils.errors import ConfigError, DataError, WeightSyncError
from slime.utils.files import lock_file, replace_file, sync_to_disk
from slime.utils.misc import load_function
from slime.utils.plugins import PluginCall, call_plugin
from slime.weights.hf_files import INDEX_FILE, is_weight_file
from slime.weights.stored_tensors import MappedFile, StoredTensor, read_header, read_layout, weight_files

logger = logging.getLogger(__name__)

STATE_FOLDER = ".weight_sync"
LOCAL_FLAG = "--update-weight-local-checkpoint-dir"
POLL_S = 0.1
VISIBLE_S = 30.0
"""Seconds for a folder that was renamed on another host to become visible on a network file system."""


@dataclass(frozen=True, slots=True)
class PullReport:
    """What one pull did."""

    version: int
    seed: str
    """The folder that was copied first; empty if the existing copy was usable."""
    applied: tuple[int, ...]
    """Versions whose deltas were applied."""
    num_bytes: int
    """Bytes read from the shared folder: the seed and the deltas."""
    elapsed_s: float


class LocalCopy:
    """The copy in ``folder``.

    Args:
        folder: a folder on a local disk, reserved for the copy.
        timeout_s: seconds to wait for another process that works on the copy, and for a version to become visible.

    Raises:
        ConfigError: ``folder`` is the model or the shared folder itself, whose files would be changed.
    """

    def __init__(
        self, folder: str | Path, *, source: str | Path, model: str | Path, timeout_s: float, workers: int = 4
    ) -> None:
        self.folder, self.source, self.model = Path(folder), Path(source), Path(model)
        self.timeout_s, self.workers = timeout_s, workers
        if self.folder.resolve() in (self.model.resolve(), self.source.resolve()):
            raise ConfigError(f"{LOCAL_FLAG} is {folder}, which is a source of weights; name another folder")
        self._state_file = self.folder / STATE_FOLDER / "state.json"

    def pull(self, target: int, *, rebuild: bool = False) -> PullReport:
        """Bring the copy to version ``target``.

        Raises:
            WeightSyncError: ``target`` cannot be reached, is older than the held version, or a checksum is wrong (the
                message names the tensor and the file).  The copy is then dirty if any byte was changed.
        """
        started = time.monotonic()
        with explained_disk_errors(self.folder, LOCAL_FLAG):
            self._state_file.parent.mkdir(parents=True, exist_ok=True)
            with self._locked():
                self._wait_until_visible(target)
                held = None if rebuild else self.held()
                route = find_route(self.source, target, held)
                num_bytes, seed = 0, None
                if route.seed is not None or route.from_model:
                    seed = self.model if route.seed is None else route.seed.folder
                    num_bytes += self._copy(seed, route.seed)
                for version in route.deltas:
                    num_bytes += self._apply(version)
        applied = tuple(version.number for version in route.deltas)
        report = PullReport(target, str(seed or ""), applied, num_bytes, time.monotonic() - started)
        if seed is not None or applied:
            logger.info(
                "%s went from %s to version %d in %.2f s: %s%d bytes read, deltas applied: %s.",
                self.folder, describe_held(held), target, report.elapsed_s,
                f"copied from {seed}, " if seed else "", num_bytes, list(applied) or "none",
            )  # fmt: skip
        return report

    # State

    def held(self) -> tuple[int, str] | None:
        """Return number and chain of the copy's version; None if the copy is missing or cannot be trusted."""
        try:
            state = json.loads(self._state_file.read_text())
            if state["dirty"] or state["model"] != _identity(self.model):
                return None
            return int(state["version"]), state["chain"]
        except (OSError, ValueError, KeyError, TypeError):
            return None  # never created, or by another program: pull recreates it

    def mark_dirty(self, why: str) -> None:
        """Make the next pull recreate the copy."""
        self._write_state(0, "", dirty=why)

    def _write_state(self, number: int, chain: str, *, dirty: str = "") -> None:
        content = {
            "version": version_text(number), "chain": chain, "model": _identity(self.model), "dirty": dirty,
        }  # fmt: skip
        replace_file(self._state_file, lambda file: file.write(json.dumps(content, indent=2).encode()))

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Admit one process of the host at a time; the lock is released when its process ends."""
        path = self._state_file.with_name("lock")
        with path.open("w") as file:
            try:
                lock_file(file.fileno(), path, timeout_s=self.timeout_s, poll_s=POLL_S)
            except TimeoutError:
                raise WeightSyncError(
                    f"another process has held the lock {path} on {self.folder} for {self.timeout_s:g} s "
                    "(--weight-update-timeout-s)"
                ) from None
            yield

    def _wait_until_visible(self, target: int) -> None:
        """Wait for a new folder, which may become visible seconds late on a network file system."""
        deadline = time.monotonic() + min(self.timeout_s, VISIBLE_S)
        while target and not (version_folder(self.source, target) / INDEX_FILE).exists():
            if time.monotonic() > deadline:
                present = ", ".join(path.name for path in list_folders(self.source)) or "no version"
                raise WeightSyncError(
                    f"{version_folder(self.source, target)} does not exist on this host; {self.source} shows "
                    f"{present}. Is --update-weight-disk-dir shared between trainer and engines?"
                )
            time.sleep(POLL_S)

    # Recreating the copy

    def _copy(self, seed: Path, version: Version | None) -> int:
        """Make the copy equal to ``seed``, the folder of ``version`` (None: the model).

        Copies every file, compares sizes, and removes all other files.

        Returns:
            Bytes copied.
        """
        self.mark_dirty(f"being copied from {seed}")
        weights = weight_files(seed)
        if not weights:
            raise DataError(f"{seed} holds no safetensors files, which pushes over a disk need")
        files = weights + [path for path in seed.iterdir() if _is_asset(path)]
        if (seed / INDEX_FILE).exists():
            files.append(seed / INDEX_FILE)
        for path in self.folder.iterdir():
            if path.name != STATE_FOLDER:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        with ThreadPoolExecutor(self.workers) as pool:
            sizes = list(pool.map(self._copy_file, files))
        sync_to_disk(self.folder)
        self._write_state(*((0, "") if version is None else (version.number, version.chain)))
        return sum(sizes)

    def _copy_file(self, path: Path) -> int:
        target = self.folder / path.name
        shutil.copyfile(path, target)
        size, copied = path.stat().st_size, target.stat().st_size
        if size != copied:
            raise WeightSyncError(
                f"{target} has {copied} bytes but its source {path} has {size}; the copy was cut off"
            )
        sync_to_disk(target)
        return size

    # From one version to the next

    def _apply(self, version: Version) -> int:
        """Apply the delta of ``version`` in place and verify the result; return the bytes read."""
        held = self.held()
        if held is None or held[0] != version.base or (held[0] and held[1] != version.chain):
            raise WeightSyncError(
                f"{version.folder} changes version {version.base}, but {self.folder} holds {describe_held(held)}; "
                "versions are applied in order"
            )
        layout = read_layout(self.folder)
        deltas: list[tuple[StoredTensor, str, str]] = []
        for file in weight_files(version.folder):
            tensors, checksums = read_header(file)
            for name, delta in tensors.items():
                if name not in layout or name not in checksums:
                    what = f"which {self.folder} lacks" if name not in layout else "without its checksum"
                    raise WeightSyncError(f"{file} changes {name}, {what}; it was made for another model")
                deltas.append((delta, name, checksums[name]))
        if deltas:
            self.mark_dirty(f"being changed from version {version.base} to {version.number}")
            self._apply_in_place(version, layout, deltas)
        self._write_state(version.number, version.chain)
        return sum(delta.num_bytes for delta, _, _ in deltas)

    def _apply_in_place(
        self, version: Version, layout: dict[str, StoredTensor], deltas: Sequence[tuple[StoredTensor, str, str]]
    ) -> None:
        with ExitStack() as stack:
            read = {path: stack.enter_context(MappedFile(path)) for path in {delta.file for delta, _, _ in deltas}}
            written = {
                path: stack.enter_context(MappedFile(path, is_writable=True))
                for path in {layout[name].file for _, name, _ in deltas}
            }

            def work(entry: tuple[StoredTensor, str, str]) -> None:
                delta, name, expected = entry
                stored = layout[name]
                blob = read[delta.file].part(delta).data
                try:
                    found = apply_delta(
                        written[stored.file].part(stored), blob, encoding=version.encoding, checksum=version.checksum
                    )
                except WeightSyncError as error:
                    raise WeightSyncError(f"{name} cannot be changed by {delta.file}: {error}") from error
                if found != expected:
                    raise WeightSyncError(
                        f"{name} in {stored.file} has the {version.checksum} checksum {found} after applying "
                        f"{delta.file}, which expects {expected}: the delta or the copy is damaged. The copy will "
                        "be recreated"
                    )

            with ThreadPoolExecutor(self.workers) as pool:
                for _ in pool.map(work, deltas):
                    pass


def _is_asset(path: Path) -> bool:
    return path.is_file() and not path.name.startswith(".") and not is_weight_file(path.name)


def _identity(model: Path) -> str:
    """Return a fingerprint of a model folder, from the names, sizes and modification times of its files."""
    files = sorted(path for path in weight_files(model) if path.exists())
    stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return f"{os.path.realpath(model)} {hashlib.sha256(repr(stats).encode()).hexdigest()[:16]}"


def pull_weights(engine: WeightVerbs, target_version: int, rebuild: bool = False) -> str:
    """Bring the copy of the checkpoint on this engine's host to ``target_version`` and return its folder.

    The weights that the engine serves do not change.

    Args:
        engine: the engine actor that calls this; stock SGLang has no such endpoint.
        target_version: a version in ``--update-weight-disk-dir``; 0 is ``--hf-checkpoint`` itself.

    Raises:
        WeightSyncError: the version cannot be reached, or its bytes are not what their checksums say.
    """
    args = engine.args
    path = args.sglang_custom_pull_weights_pre_read_hook
    if path is not None and target_version > 0:
        call = PluginCall("--sglang-custom-pull-weights-pre-read-hook", path)
        call_plugin(call, load_function(path), args.update_weight_disk_dir, target_version)
    copy = LocalCopy(
        args.update_weight_local_checkpoint_dir,
        source=args.update_weight_disk_dir,
        model=args.hf_checkpoint,
        timeout_s=args.weight_update_timeout_s,
    )
    copy.pull(target_version, rebuild=rebuild)
    return str(copy.folder)
