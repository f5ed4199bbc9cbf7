"""Weight push over a shared disk: the trainer writes a version as a Hugging Face folder, and the engines read it.

    prepare   every rank writes its share, rank 0 finalizes the version, hosts pull their copies; engines still serve
    send      every engine reads the folder, once: it holds all buckets
    finish    old versions are removed

With ``--update-weight-local-checkpoint-dir`` each host first copies the version to its own disk, once for all its
engines.  With ``--release-train`` the trainer only writes (:meth:`DiskCarrier.write`); after the trainer has ended,
the driver pushes the :class:`WrittenVersion` through a :class:`FolderCarrier`.
"""

from __future__ import annotations

import logging
import shutil
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor

from slime.ext.fast_push.carrier import NO_BUCKET, Buckets, CarriedPush, Carrier
from slime.ext.fast_push.disk.local_copy import pull_weights
from slime.ext.fast_push.disk.versions import (
    CHAIN,
    PartWriter,
    begin_version,
    explained_disk_errors,
    finalize_version,
    prune_before,
    remove_all,
    remove_version,
    require_space,
    version_folder,
    version_text,
)
from slime.ext.fast_push.manifest import BucketSlice, Manifest
from slime.utils.errors import HookError, WeightSyncError
from slime.utils.misc import load_function
from slime.weights.hf_files import copy_assets
from slime.weights.push.engine import EngineProxy, Pending
from slime.weights.push.participants import PUSH_FAILURES
from slime.weights.push.state import TrainerRanks

logger = logging.getLogger(__name__)

DISK_FLAG = "--update-weight-disk-dir"
WHOLE_FOLDER = -2
"""Index of the step that represents all buckets of a written version."""


@dataclass(frozen=True, kw_only=True)
class DiskOptions:
    """Settings of the shared-disk carriers."""

    root: Path
    """``--update-weight-disk-dir``."""
    model: Path
    """``--hf-checkpoint``: version 0, and the source of the assets (config, tokenizer) of every full version."""
    has_copies: bool
    """Every host makes its own copy first (``--update-weight-local-checkpoint-dir``)."""
    keeps_files: bool
    """``--update-weight-disk-keep-files``."""
    continues_run: bool
    """True if the folder has versions of an earlier trainer of this run (``--release-train``)."""
    encoding: str
    """``--update-weight-delta-encoding``."""
    checksum: str
    """``--update-weight-delta-checksum``."""
    on_written: Callable[[Path, Sequence[Any]], None] | None = None
    """Hook called on every rank with a version's folder and the engines' handles, before engines read the folder."""

    @classmethod
    def of(cls, args: Namespace) -> DiskOptions:
        """Read the settings from flags."""
        has_hook = args.custom_update_weight_post_write_path is not None
        return cls(
            root=Path(args.update_weight_disk_dir),
            model=Path(args.hf_checkpoint),
            has_copies=args.update_weight_local_checkpoint_dir is not None,
            keeps_files=args.update_weight_disk_keep_files,
            continues_run=bool(args.update_weight_start_version),
            encoding=args.update_weight_delta_encoding,
            checksum=args.update_weight_delta_checksum,
            on_written=partial(_call_hook, args) if has_hook else None,
        )


def _call_hook(args: Namespace, folder: Path, engines: Sequence[Any]) -> None:
    """Call the user's hook.

    Raises:
        HookError: the hook raised.
    """
    path = args.custom_update_weight_post_write_path
    try:
        load_function(path)(args, str(folder), engines)
    except Exception as error:  # user's code
        raise HookError(f"--custom-update-weight-post-write-path {path} failed on {folder}: {error!r}") from error


@dataclass(frozen=True, slots=True)
class WrittenVersion:
    """A version on disk, as the source of a push."""

    root: Path
    """``--update-weight-disk-dir``."""
    number: int
    manifest: Manifest
    bucket_digests: Mapping[int, int]
    """Digest of every bucket of the manifest."""
    has_copies: bool
    """Every host makes its own copy first (``--update-weight-local-checkpoint-dir``)."""
    repacks: bool
    """True if engines repack quantized weights around a push."""
    metrics: Mapping[str, float]

    @property
    def constant_digests(self) -> Mapping[int, int]:
        """Empty: engines read the whole model from the folder."""
        return {}

    def iter_buckets(self, *, with_constants: bool = True) -> Iterator[tuple[int, Tensor]]:
        """Yield one step for the whole folder."""
        yield WHOLE_FOLDER, torch.empty(0, dtype=torch.uint8)

    def digests(self) -> dict[int, int]:
        """Return the digests taken when the version was written."""
        return dict(self.bucket_digests)


class FolderCarrier(Carrier):
    """Has engines read a :class:`WrittenVersion`."""

    needs_loader = False
    _folders: Mapping[int, str] = {}
    """Engine index -> folder that the engine reads; rank 0 only."""
    _must_rebuild = False
    """True if hosts must recreate their copies even if these look intact."""

    def prepare(self, push: CarriedPush, source: Buckets) -> Buckets:
        """Have all hosts fetch the version."""
        assert isinstance(source, WrittenVersion)
        push.on_main_rank("letting the engines' hosts fetch the weights", lambda: self._fetch(push, source))
        push.metrics |= source.metrics
        return source

    def open(self, push: CarriedPush, manifest: Manifest) -> None:
        """Do nothing: all engines can read the disk."""

    def send(self, push: CarriedPush, index: int, flat: Tensor) -> None:
        """Have every engine read the version."""
        push.on_main_rank(f"reading version {push.version} from disk", lambda: self._read(push))

    def _fetch(self, push: CarriedPush, version: WrittenVersion) -> None:
        if not version.has_copies:
            shared = str(version_folder(version.root, version.number))
            self._folders = {engine.index: shared for engine in push.participants.good}
            return
        self._folders = push.participants.ask(
            f"pulling version {version.number}",
            lambda engine: engine.run(pull_weights, version.number, self._must_rebuild, on_all_nodes=True),
        )

    def _read(self, push: CarriedPush) -> None:
        def start(engine: EngineProxy) -> Pending:
            return push.read_folder(engine, self._folders[engine.index])

        push.participants.ask(f"reading version {push.version}", start)


class DiskCarrier(FolderCarrier):
    """Full versions, written by the trainer's ranks.  The delta transport overrides what a rank writes."""

    by_stage = True

    def __init__(self, ranks: TrainerRanks, disk: DiskOptions) -> None:
        super().__init__(ranks)
        self.disk = disk
        place = (self.ranks.stage, self.ranks.rank)
        members = [rank for stage, rank in self.ranks.gather(place) if stage == self.ranks.stage]
        self._shares = Shares(len(members), members.index(self.ranks.rank))
        """Assigns each tensor of this pipeline stage, which all ranks of the stage gather, to one writer."""
        self._chain = ""
        self.written: WrittenVersion | None = None
        """The version in the folder that engines can still read; None if there is none."""
        self._is_doubted = False
        """True if an engine may hold something else than it read: its host then recreates the copy at a resend."""
        self._num_changed = 0
        """Bytes of this rank's share that differ from the previous version."""

    def prepare(self, push: CarriedPush, source: Buckets) -> Buckets:
        """Write the version, unless the last push wrote it, and have all hosts fetch it."""
        if self.written is None or self.written.number != int(push.version):
            self.write(push, source)
        assert self.written is not None
        self._must_rebuild = push.is_resend and self._is_doubted
        return super().prepare(push, self.written)

    def write(self, push: CarriedPush, source: Buckets) -> WrittenVersion:
        """Write and finalize a version with the current weights.  Collective.

        Raises:
            WeightSyncError: the disk is full or fails, or the hook raised.
        """
        self.written = None
        if not self._chain:
            self._begin_chain(push)
        number, manifest = int(push.version), source.manifest
        final = version_folder(self.disk.root, number)
        size = sum(tensor.num_bytes for tensor in manifest.tensors)
        self._num_changed = 0
        self._begin_write(manifest)
        num_bytes = self.assemble(
            push, final, lambda writer: self._write_buckets(push, source, writer), self._index(number), size
        )
        self.written = WrittenVersion(
            root=self.disk.root,
            number=number,
            manifest=manifest,
            bucket_digests=push.digests,
            has_copies=self.disk.has_copies,
            repacks=push.repacks,
            metrics={
                "perf/update_weights_wire_bytes": float(num_bytes),
                "perf/update_weights_density": sum(self.ranks.gather(self._num_changed)) / max(size, 1),
            },
        )
        if (hook := self.disk.on_written) is not None:
            engines = [getattr(engine, "handle", engine) for engine in push.participants.engines.values()]
            push.run_together("running --custom-update-weight-post-write-path", lambda: hook(final, engines))
        return self.written

    def finish(self, push: CarriedPush, *, is_served: bool) -> None:
        """Remove versions that will not be read again."""
        self._is_doubted = not is_served or bool(push.participants.reasons)
        if is_served:
            self._after_commit(push)
        else:
            self._discard()

    def _begin_chain(self, push: CarriedPush) -> None:
        """Start the chain of this run (see ``versions``): remove versions of earlier runs and choose a random id."""

        def clear() -> None:
            with explained_disk_errors(self.disk.root, DISK_FLAG):
                self.disk.root.mkdir(parents=True, exist_ok=True)
                if not self.disk.continues_run:
                    remove_all(self.disk.root)

        push.on_main_rank("clearing the folder of weight versions", clear)
        self._chain = self.ranks.from_main(uuid4().hex[:8])

    @torch.no_grad()
    def _write_buckets(self, push: CarriedPush, source: Buckets, writer: PartWriter) -> None:
        """Write this rank's share.  Iterates to the end even after a failure: other ranks gather with this one."""
        manifest = source.manifest
        for index, flat in source.iter_buckets():
            if index == NO_BUCKET or push.failures:
                continue
            with self.failures_recorded(push):
                slices = [
                    part
                    for part in manifest.buckets[index].slices
                    if self._shares.is_own(part.name, manifest.by_name[part.name].num_bytes)
                ]
                self._write_slices(writer, slices, flat, manifest)
        push.digests = source.digests()

    def assemble(
        self,
        push: CarriedPush,
        final: Path,
        write: Callable[[PartWriter], None],
        metadata: Mapping[str, object],
        needed_bytes: int,
    ) -> int:
        """Write a version on all ranks and finalize it; return its bytes.  Collective; a failure leaves no files."""
        unfinished = Path()
        is_whole = "delta_encoding" not in metadata

        def begin() -> None:
            nonlocal unfinished
            with explained_disk_errors(self.disk.root, DISK_FLAG):
                if is_whole:
                    require_space(self.disk.root, needed_bytes, DISK_FLAG)
                unfinished = begin_version(final)

        push.on_main_rank(f"beginning {final.name}", begin)
        unfinished = self.ranks.from_main(unfinished)
        try:
            writer = PartWriter(unfinished, self.ranks.rank)
            write(writer)
            with self.failures_recorded(push):
                writer.flush()
            push.meet(f"writing {final.name}")
            parts = self.ranks.gather(writer.files)

            def finalize() -> None:
                with explained_disk_errors(self.disk.root, DISK_FLAG):
                    if is_whole:
                        copy_assets(self.disk.model, unfinished)
                    finalize_version(unfinished, final, parts, metadata, first=int(is_whole))

            push.on_main_rank(f"finalizing {final.name}", finalize)
        except WeightSyncError:
            if self.ranks.rank == 0:
                shutil.rmtree(unfinished, ignore_errors=True)
            raise
        return sum(file.num_bytes for files in parts for file in files)

    @contextmanager
    def failures_recorded(self, push: CarriedPush) -> Iterator[None]:
        """Record an error of this rank; the next ``meet`` raises it on all ranks."""
        try:
            with explained_disk_errors(self.disk.root, DISK_FLAG):
                yield
        except PUSH_FAILURES as error:
            push.failures.append(error)

    # What differs between full versions and deltas

    def _begin_write(self, manifest: Manifest) -> None:
        """Prepare to write a version; called before its first byte.  Collective."""

    def _index(self, number: int) -> dict[str, object]:
        """Return the metadata of the version's index."""
        return {"version": version_text(number), CHAIN: self._chain}

    def _write_slices(
        self, writer: PartWriter, slices: Sequence[BucketSlice], flat: Tensor, manifest: Manifest
    ) -> None:
        """Write the given tensors of a bucket in full."""
        for part in slices:
            entry = manifest.by_name[part.name]
            data = flat[part.offset : part.offset + entry.num_bytes].to("cpu", copy=True)
            writer.add(part.name, as_tensor(data, entry.torch_dtype, entry.shape))
            self._num_changed += entry.num_bytes

    def _after_commit(self, push: CarriedPush) -> None:
        """Remove the version that the engines serve, unless some engine failed and must read it again."""
        if self.disk.keeps_files:
            return
        is_read_again = bool(push.participants.reasons)
        self._prune(int(push.version) + (not is_read_again))
        if not is_read_again:
            self.written = None

    def _prune(self, number: int) -> None:
        """Remove every version older than ``number``.  A failure is only logged: the push itself has succeeded."""
        if self.ranks.rank == 0:
            try:
                prune_before(self.disk.root, number)
            except OSError as error:
                logger.error("Old weight versions in %s could not be removed: %s", self.disk.root, error)

    def _discard(self) -> None:
        """Remove the written version, which no engine serves, so that no reader finds it."""
        if self.written is not None and self.ranks.rank == 0:
            remove_version(version_folder(self.disk.root, self.written.number))
        self.written = None


class Shares:
    """Assigns each tensor to the process with the fewest bytes so far.

    Every process sees the same tensors in the same order, so all agree without communication.
    """

    def __init__(self, num_members: int, member: int) -> None:
        self._member = member
        self._loads = [0] * num_members
        self._owners: dict[str, int] = {}

    def is_own(self, name: str, num_bytes: int) -> bool:
        """Return whether this process writes the tensor; the answer never changes."""
        if name not in self._owners:
            owner = self._loads.index(min(self._loads))
            self._owners[name] = owner
            self._loads[owner] += num_bytes
        return self._owners[name] == self._member


def as_tensor(data: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """Return flat bytes as a tensor."""
    return data.view(dtype).view(tuple(shape)) if data.numel() else torch.empty(tuple(shape), dtype=dtype)
