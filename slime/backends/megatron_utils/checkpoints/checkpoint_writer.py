"""Writing the files of a ``torch_dist`` checkpoint: while the caller waits, or behind the back of training.

    {folder}/common.pt        arguments, scheduler, counters: written by rank 0
    {folder}/__{rank}_{n}.distcp
    {folder}/.metadata        which tensor lies where
    {folder}/metadata.json    the format's name, last of all: a folder without it is no checkpoint

megatron-core's own strategy forks writer processes and talks to them over queues of a spawned manager: seconds of
start-up, and a wait without end when a writer dies.  Here megatron-core plans, torch's file-system writer writes, in
threads of this process.  The files are the same.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slime.backends.megatron_utils import cpu_platform  # noqa: F401

# isort: split
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing.core import CheckpointingConfig, CheckpointingException, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedTensor
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.dist_checkpointing.validation import validate_sharding_integrity

from slime.utils.atomic_file import sync_to_disk
from slime.utils.distributed_utils import init_gloo_group
from slime.utils.errors import DataError

logger = logging.getLogger(__name__)

COMMON_FILE = "common.pt"
WRITER_THREADS = 2

Shards = dict[str, list[ShardedBase]]
"""Tensors that this rank writes, by name on disk."""


def write_checkpoint(
    state: dict[str, Any],
    folder: Path,
    *,
    background: BackgroundSave | None = None,
    planner: MCoreSavePlanner | None = None,
    writer_threads: int = WRITER_THREADS,
    resplit: Callable[[Shards], Shards] | None = None,
) -> None:
    """Write ``state`` into the empty ``folder``.  Collective.

    Args:
        state: sharded tensors and objects, and values that are equal on all ranks.
        folder: on a file system that all ranks share.
        background: go on at once; it writes what the tensors hold now.
        planner: resolves tensors in a way of its own.
        writer_threads: files that a rank writes at a time.
        resplit: cuts what this rank writes into other pieces.

    Raises:
        DataError: the shards of the ranks do not make up whole tensors, or a rank could not write.
    """
    shards, common = _split(state)
    if resplit is not None:
        shards = resplit(shards)
    if dist.get_rank() == 0:
        torch.save(common, folder / COMMON_FILE)
    if background is not None:
        background.start(shards, folder)
        return
    try:
        _write(shards, folder, init_gloo_group(), planner or _planner(), writer_threads)
    except (CheckpointingException, dcp.api.CheckpointException, OSError) as error:
        raise DataError(f"the checkpoint {folder} could not be written: {error}") from error


def _split(state: dict[str, Any]) -> tuple[Shards, dict[str, Any]]:
    """Return the shards that this rank writes, and the state common to all ranks.  Collective."""
    sharded, common = save_preprocess(state, validate_access_integrity=False)
    group = init_gloo_group()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, [entry.without_data() for entry in nested_values(sharded)], group=group)
    verdict = [""]
    try:
        validate_sharding_integrity(everyone)  # looks on rank 0 only
    except CheckpointingException as error:
        verdict = [str(error)]
    dist.broadcast_object_list(verdict, src=0, group=group)
    if verdict[0]:
        raise DataError(f"the ranks' shards do not make up whole tensors: {verdict[0]}")
    return _replace_state_dict_keys_with_sharded_keys(sharded, keep_only_main_replica=True)[0], common


def _planner() -> MCoreSavePlanner:
    return MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)


class _FileWriter(dcp.FileSystemWriter):
    """torch's writer, which forgets what failed in its second thread."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        """Write the plan's items and check that none is missing."""
        results = super().write_data(plan, planner)
        if len(results.value()) != len(plan.items):
            raise OSError(f"{len(plan.items) - len(results.value())} tensors could not be written (see above)")
        return results


def _write(
    shards: Shards, folder: Path, group: dist.ProcessGroup, planner: MCoreSavePlanner, writer_threads: int
) -> None:
    """Write all ranks' files, then the two that complete the checkpoint.  Collective over ``group``."""
    # No copying ahead: it would open a CUDA stream in a thread that knows no device.
    writer = _FileWriter(folder, thread_count=writer_threads, sync_files=True, per_thread_copy_ahead=0)
    dcp.save(mcore_to_pyt_state_dict(shards, False), storage_writer=writer, planner=planner, process_group=group)
    if dist.get_rank() == 0:
        save_config(CheckpointingConfig("torch_dist", 1), str(folder))
        sync_to_disk(folder)
    dist.barrier(group=group)


class BackgroundSave:
    """Writes one checkpoint at a time in a thread (``--async-save``).

    Invariant: a checkpoint is published when both have happened, in whichever order: every rank's files are on disk,
    and :meth:`publish` was called.  A run that dies before leaves the checkpoint before as the latest.

    Args:
        publish: makes an iteration of a save folder the one that counts; called on rank 0.
    """

    def __init__(self, publish: Callable[[str, int | str], None]) -> None:
        """Make the writer.  Collective: its threads talk over a group of their own, not over one of training."""
        self._group = dist.new_group(backend="gloo")
        self._publish = publish
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._is_written = True
        self._wanted: tuple[str, int | str] | None = None

    def start(self, shards: Shards, folder: Path) -> None:
        """Copy ``shards`` to the host and begin to write them; the one before must be finished.  Collective."""
        self.wait()
        on_host = {key: [_on_host(entry) for entry in entries] for key, entries in shards.items()}
        self._is_written, self._wanted = False, None
        self._thread = threading.Thread(target=self._run, args=(on_host, folder), name="checkpoint writer")
        self._thread.start()

    def _run(self, shards: Shards, folder: Path) -> None:
        start = time.monotonic()
        try:
            _write(shards, folder, self._group, _planner(), WRITER_THREADS)
            with self._lock:
                self._is_written = True
                self._publish_if_due()
        except BaseException as error:
            logger.exception("checkpoint %s could not be written", folder)
            self._error = error
            return
        if dist.get_rank(self._group) == 0:
            logger.info("checkpoint %s is on disk, %.1f s behind training", folder, time.monotonic() - start)

    def publish(self, save_dir: str, iteration: int | str) -> None:
        """Let the checkpoint count as soon as it is on disk."""
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
        """Wait until the files are on disk; returns at once when none are being written.

        Raises:
            DataError: they could not be written; the checkpoint does not count.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise DataError(f"the checkpoint that was being written in the background is lost: {error}") from error


def _on_host(entry: ShardedBase) -> ShardedBase:
    """Return the entry with a copy of its tensor's present values."""
    if isinstance(entry, ShardedTensor):
        entry.data = entry.data.detach().to("cpu", copy=True)
    return entry
