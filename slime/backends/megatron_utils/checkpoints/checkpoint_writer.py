"""Writes the files of a ``torch_dist`` checkpoint, while the caller waits or in the background.

    {folder}/__{rank}_{n}.distcp
    {folder}/.metadata        the file and offset of each tensor
    {folder}/common.pt        arguments, scheduler, counters
    {folder}/digests.json     digests of all bytes, computed while writing
    {folder}/metadata.json    the format's name, written last: a folder without it is not a checkpoint

Files are written in this order, each on disk before the next.  A failed save leaves no folder behind.

megatron-core's own strategy forks writer processes and communicates over queues of a spawned manager, which takes
seconds to start and hangs if a writer dies.  Here megatron-core plans, and torch's file-system writer writes in
threads of this process.  The files are the same.
"""

from __future__ import annotations

import errno
import io
import json
import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing.core import CheckpointingConfig, CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedTensor
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.dist_checkpointing.validation import validate_sharding_integrity
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem, _StorageWriterTransforms
from torch.futures import Future

from slime.backends.megatron_utils.checkpoints.checkpoint_loader import first_cause
from slime.backends.megatron_utils.checkpoints.checkpoint_reader import COMMON_FILE, FORMAT, FORMAT_FILE
from slime.utils.distributed_utils import gather_objects, init_file_group, object_of_first
from slime.utils.errors import DataError, SlimeError
from slime.utils.files import sync_to_disk
from slime.weights.file_digests import DigestWriter, FolderDigests, Piece

logger = logging.getLogger(__name__)

WRITER_THREADS = 2

Shards = dict[str, list[ShardedBase]]
"""Shards that this rank writes, by name on disk."""


def write_checkpoint(
    state: dict[str, Any],
    folder: Path,
    *,
    background: BackgroundSave | None = None,
    planner: HostPlanner | None = None,
    writer_threads: int = WRITER_THREADS,
    resplit: Callable[[Shards], Shards] | None = None,
) -> None:
    """Write ``state`` into the empty ``folder``.  Collective.

    Args:
        state: sharded tensors and objects, and values that are equal on all ranks.
        background: copies the tensors and writes the copies in a thread; this function then returns early.
        planner: moves tensors to the host; a :class:`HostPlanner` by default.
        writer_threads: threads per rank.
        resplit: changes which shards this rank writes.

    Raises:
        DataError: the ranks' shards do not make up whole tensors, or a rank could not write.
    """
    shards, common = _split(state)
    if resplit is not None:
        shards = resplit(shards)
    content = io.BytesIO()
    if dist.get_rank() == 0:
        torch.save(common, content)  # not in the thread: training changes the scheduler meanwhile
    if background is not None:
        background.start(shards, content.getvalue(), folder)
        return
    _write(shards, content.getvalue(), folder, init_file_group(), planner or HostPlanner(), writer_threads)


def _split(state: dict[str, Any]) -> tuple[Shards, dict[str, Any]]:
    """Return the shards that this rank writes, and the state common to all ranks.  Collective."""
    sharded, common = save_preprocess(state, validate_access_integrity=False)
    everyone = gather_objects([entry.without_data() for entry in nested_values(sharded)])
    verdict = ""
    try:
        validate_sharding_integrity(everyone)  # checks on rank 0 only
    except CheckpointingException as error:
        verdict = str(error)
    if verdict := object_of_first(verdict):
        raise DataError(f"the ranks' shards do not make up whole tensors: {verdict}")
    return _replace_state_dict_keys_with_sharded_keys(sharded, keep_only_main_replica=True)[0], common


class HostPlanner(MCoreSavePlanner):
    """Copies each tensor to the host when torch's writer is about to write it.

    The writer keeps all tensors of a file until the file is complete.  To save memory, a copy's storage is freed when
    the thread that wrote it requests the next tensor.
    """

    def __init__(self) -> None:
        super().__init__(dedup_replicated_tensors=False, flatten_state_dict=False)
        self._written = threading.local()

    def resolve_data(self, write_item: Any) -> Any:
        """Return the value to write, which is valid until this thread's next call."""
        if (copy := getattr(self._written, "copy", None)) is not None:
            copy.untyped_storage().resize_(0)
            self._written.copy = None
        value = super().resolve_data(write_item)
        if not isinstance(value, Tensor):
            return value
        tensor = self.on_host(value)
        if tensor is not value:
            self._written.copy = tensor
        return tensor

    def on_host(self, value: Tensor) -> Tensor:
        """Return the tensor if it is on the host, otherwise a copy in new host memory."""
        return value if value.is_cpu else value.detach().cpu()


class _DigestedFiles(FileSystem):
    """Writes one rank's files, and computes their digests while writing."""

    def __init__(self) -> None:
        self.pieces: dict[str, list[Piece]] = {}
        self.error: OSError | None = None
        """The first file-system error of any thread."""

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        """Open a file; with mode "wb", compute digests of what is written."""
        if mode != "wb":
            with super().create_stream(path, mode) as plain:
                yield plain
            return
        try:
            with Path(path).open(mode) as file:
                stream = DigestWriter(file, Path(path))
                try:
                    yield stream
                    stream.close()
                    self.pieces[Path(path).name] = stream.pieces
                finally:
                    self.error = self.error or stream.error
        except OSError as error:
            self.error = self.error or error
            raise

    def rename(self, path: Any, new_path: Any) -> None:
        """Rename a finished file."""
        super().rename(path, new_path)
        self.pieces[Path(new_path).name] = self.pieces.pop(Path(path).name)

    def write_file(self, path: Path, content: bytes) -> None:
        """Write a whole file and sync it to disk."""
        with self.create_stream(path, "wb") as stream:
            stream.write(content)


class _PieceMarks(_StorageWriterTransforms):
    """Marks where each tensor begins in its file; does not change the bytes."""

    def transform_save_stream(self, write_item: Any, raw_stream: Any) -> Any:
        """Return the stream to write the tensor to."""
        raw_stream.begin_piece()
        return super().transform_save_stream(write_item, raw_stream)


class _FileWriter(dcp.FileSystemWriter):
    """torch's writer, extended with digests and with the causes of errors in its threads.

    Args:
        common: content of ``common.pt``, on rank 0.
    """

    def __init__(self, folder: Path, common: bytes, threads: int) -> None:
        # No copying ahead: it would open a CUDA stream in a thread without a device.  No sync by torch, which would
        # miss what is still in the file's buffer: closing the file syncs it.
        super().__init__(folder, thread_count=threads, sync_files=False, per_thread_copy_ahead=0)
        self.fs = self._files = _DigestedFiles()
        self.transforms = _PieceMarks()
        self._folder, self._common = folder, common

    def write_data(self, plan: Any, planner: Any) -> Any:
        """Write the plan's items; the digests are appended to torch's results."""
        try:
            results = super().write_data(plan, planner).value()
        except (OSError, RuntimeError) as error:  # torch's zip writer hides a full disk behind an error of its own
            raise self._files.error or error from error
        if self._files.error is not None:
            raise self._files.error
        if len(results) != len(plan.items):
            raise OSError(f"{len(plan.items) - len(results)} tensors could not be written (see above)")
        done: Future[Any] = Future()
        done.set_result([*results, self._files.pieces])
        return done

    def finish(self, metadata: Any, results: list[list[Any]]) -> None:
        """Write the files that complete the checkpoint; torch calls it on rank 0 and reports errors to all ranks."""
        pieces = {name: digests for rank in results for name, digests in rank.pop().items()}
        super().finish(metadata, results)
        self._files.write_file(self._folder / COMMON_FILE, self._common)
        name = json.dumps(asdict(CheckpointingConfig(FORMAT, 1))).encode()
        unfinished = self._folder / f"{FORMAT_FILE}.tmp"
        self._files.write_file(unfinished, name)
        self._files.pieces[FORMAT_FILE] = self._files.pieces.pop(unfinished.name)
        FolderDigests(self._folder, pieces | self._files.pieces).write()
        unfinished.rename(self._folder / FORMAT_FILE)
        sync_to_disk(self._folder)
        sync_to_disk(self._folder.parent)


def _write(
    shards: Shards,
    common: bytes,
    folder: Path,
    group: dist.ProcessGroup,
    planner: HostPlanner,
    writer_threads: int,
) -> None:
    """Write all ranks' files, then those that complete the checkpoint.  Collective over ``group``.

    Raises:
        DataError: writing failed; raised on every rank, after the folder was removed.
    """
    writer = _FileWriter(folder, common, writer_threads)
    try:
        dcp.save(mcore_to_pyt_state_dict(shards, False), storage_writer=writer, planner=planner, process_group=group)
    except (CheckpointingException, dcp.api.CheckpointException, OSError, RuntimeError) as error:
        cause = first_cause(error)
        if not isinstance(error, RuntimeError):  # a RuntimeError is the group's: a rank died or timed out
            dist.barrier(group=group)  # afterwards no rank is writing
        if dist.get_rank(group) == 0:
            shutil.rmtree(folder, ignore_errors=True)
        if isinstance(cause, SlimeError):
            raise cause from error
        raise DataError(
            f"The checkpoint {folder} could not be written: {_reason(cause)}. The unfinished folder is removed; the "
            "checkpoints before it are untouched."
        ) from error


def _reason(cause: BaseException) -> str:
    if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"there is no space left for {cause.filename or 'its files'} ({cause.strerror}); free some, save to "
            "another disk (--save), or keep fewer checkpoints (--keep-last)"
        )
    return f"{type(cause).__name__}: {cause}"


class BackgroundSave:
    """Writes one checkpoint at a time in a thread (``--async-save``).

    Invariant: a checkpoint is published once every rank's files are on disk and :meth:`publish` was called, in either
    order.  If the run dies before that, the previous checkpoint stays the current one.

    Args:
        publish: called on rank 0 with the save folder and the iteration to make current.
    """

    def __init__(self, publish: Callable[[str, int | str], None]) -> None:
        """Create the writer.  Collective: its threads communicate over a group that training does not use."""
        self._group = init_file_group()
        self._publish = publish
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._is_written = True
        self._wanted: tuple[str, int | str] | None = None

    def start(self, shards: Shards, common: bytes, folder: Path) -> None:
        """Copy ``shards`` to the host and start writing them.  Collective; the previous save must be finished."""
        on_host = {key: [_on_host(entry) for entry in entries] for key, entries in shards.items()}
        self._is_written, self._wanted = False, None
        self._thread = threading.Thread(target=self._run, args=(on_host, common, folder), name="checkpoint writer")
        self._thread.start()

    def _run(self, shards: Shards, common: bytes, folder: Path) -> None:
        start = time.monotonic()
        try:
            _write(shards, common, folder, self._group, HostPlanner(), WRITER_THREADS)
            with self._lock:
                self._is_written = True
                self._publish_if_due()
        except BaseException as error:
            logger.exception("Checkpoint %s could not be written", folder)
            self._error = error
            return
        if dist.get_rank(self._group) == 0:
            logger.info("Checkpoint %s is on disk, %.1f s behind training", folder, time.monotonic() - start)

    def publish(self, save_dir: str, iteration: int | str) -> None:
        """Publish the checkpoint as soon as it is on disk."""
        with self._lock:
            self._wanted = (save_dir, iteration)
            self._publish_if_due()

    def _publish_if_due(self) -> None:
        if not self._is_written or self._wanted is None:
            return
        if dist.get_rank() == 0:
            self._publish(*self._wanted)
        self._wanted = None

    def wait(self) -> None:
        """Wait until the files are on disk; return immediately if none are being written.

        Raises:
            DataError: they could not be written; the checkpoint is not published.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise DataError(f"the checkpoint that was being written in the background is lost: {error}") from error


def _on_host(entry: ShardedBase) -> ShardedBase:
    """Replace the entry's tensor by a host copy of its current values, and return the entry."""
    if isinstance(entry, ShardedTensor):
        entry.data = entry.data.detach().to("cpu", copy=True)
    return entry
