"""Carries out a conversion: threads that take one tensor after the other, over all shards.

Memory: what one chunk of rows needs, for each worker; neither the shards nor the tensors have to fit.  The tensors of
a shard may be shared out among workers, so that a folder of one shard is converted in parallel too; a shard gets its
name when the last of its tensors is on the disk.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from slime.ext.low_precision.folders.plan import FilePlan, HfSource, Rewrite, TensorPlan, make_plan, open_source, shown
from slime.ext.low_precision.folders.target import Target, partial_path
from slime.ext.low_precision.folders.tensor_file import CHUNK_BYTES, RowReader, copy_bytes, write_at
from slime.utils.errors import ConfigError
from slime.weights.file_digests import FolderDigests, check_file

logger = logging.getLogger(__name__)

LARGEST_KEPT_BYTES = 31 * 1024**2
"""glibc gives larger blocks back to the system whenever they are freed; see :func:`_keep_freed_memory`."""


@dataclass(frozen=True)
class Report:
    """The figures of a finished conversion."""

    shards_written: int
    shards_found: int
    """Finished by an earlier run."""
    source_bytes: int
    """Read by this run."""
    elapsed_s: float
    is_complete: bool
    """True when the folder is a whole model; False while other machines have shards left."""


def rewrite_folder(
    rewrite: Rewrite,
    source_folder: str | Path,
    target_folder: str | Path,
    *,
    workers: int = 1,
    device: str | None = None,
    overwrite: bool = False,
    only_files: Collection[str] = (),
    verify: bool = True,
) -> Report:
    """Convert a model folder; a run that was interrupted is taken up by the same call.

    Args:
        target_folder: a new or empty folder, or one with an unfinished run of the same conversion.
        device: where tensors are converted; None is CUDA where there is any, all GPUs in turn.
        overwrite: replace a model in ``target_folder``.
        only_files: shards of the source to convert, all by default.
        verify: compare the source's shards with the digests beside them, if there are any.

    Raises:
        SlimeError: something is wrong with the source, the target or the settings; nothing was written.
    """
    if workers < 1:
        raise ConfigError(f"--max-workers is {workers}; it must be at least 1")
    devices = _devices(device)
    source = open_source(source_folder)
    digests = FolderDigests.read(source.folder) if verify else None
    rewrite.check(source)
    plans = make_plan(rewrite, source)
    if unknown := sorted(set(only_files) - set(source.shards)):
        raise ConfigError(
            f"--files names {shown(unknown)}, no shards of {source.folder}: {shown(list(source.shards))}"
        )
    target = Target(target_folder, source, plans)
    start = time.monotonic()
    with target.held(rewrite.settings, overwrite=overwrite, is_shared=bool(only_files)):
        wanted = [plan for plan in plans if not only_files or plan.source in only_files]
        todo = [plan for plan in wanted if not target.is_finished(plan)]
        if len(todo) < len(wanted):
            logger.info("%d of %d shards are finished already", len(wanted) - len(todo), len(wanted))
        with tqdm(
            total=sum(plan.source_bytes for plan in wanted),
            initial=sum(plan.source_bytes for plan in wanted) - sum(plan.source_bytes for plan in todo),
            desc=f"{source.folder.name} -> {target.folder.name}",
            unit="B",
            unit_scale=True,
            disable=None,
        ) as bar:
            _Conversion(source, digests, target, todo, bar).run(workers, devices)
        is_complete = all(target.is_finished(plan) for plan in plans)
        if is_complete:
            target.close(rewrite.config(source))
    return Report(
        shards_written=len(todo),
        shards_found=len(wanted) - len(todo),
        source_bytes=sum(plan.source_bytes for plan in todo),
        elapsed_s=time.monotonic() - start,
        is_complete=is_complete,
    )


def _devices(name: str | None) -> list[torch.device]:
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"--device {name} is no device of torch; use cpu, cuda or cuda:0") from error
    if device.type not in CHUNK_BYTES:
        raise ConfigError(f"--device {name} is not supported; use cpu, cuda or cuda:0")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError(f"--device {name}: torch finds no CUDA device here; use --device cpu")
        if device.index is None:
            return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return [device]


def _keep_freed_memory() -> None:
    """Let the allocator keep the memory of one chunk for the next.

    glibc takes blocks from the system and gives them back until one is freed that is larger than any before: up to its
    size, memory is kept from then on.  Without this, the kernel clears every page of every chunk: twice the time.
    """
    torch.empty(LARGEST_KEPT_BYTES, dtype=torch.uint8)


class _OpenShard:
    """A shard that is being written."""

    def __init__(self, plan: FilePlan, target: Target) -> None:
        self.plan = plan
        self._target = target
        self._partial = partial_path(target.folder / plan.name)
        self._left = len(plan.tensors)
        self._lock = threading.Lock()
        self.descriptor = os.open(self._partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        os.truncate(self.descriptor, plan.file_bytes)
        os.pwrite(self.descriptor, plan.header, 0)

    def tensor_done(self, source: HfSource, digests: FolderDigests | None) -> None:
        """Count; whoever ends the last tensor closes the file and gives it its name.

        Raises:
            DataError: the shard of the source that it is made from is damaged.
        """
        with self._lock:
            self._left -= 1
            if self._left:
                return
        with ThreadPoolExecutor(1, thread_name_prefix="digest") as pool:
            noted = pool.submit(self._target.add_digests, self.plan.name, self._partial)
            if digests is not None:
                check_file(digests, source.folder / self.plan.source)
            os.fsync(self.descriptor)
            noted.result()
        self.close()
        os.replace(self._partial, self._target.folder / self.plan.name)

    def close(self) -> None:
        """Let go of the file."""
        os.close(self.descriptor)
        self.descriptor = -1

    def abandon(self) -> None:
        """Remove what cannot be finished."""
        if self.descriptor >= 0:
            self.close()
            self._partial.unlink(missing_ok=True)


class _Conversion:
    """The tensors of the shards that are left, handed out one at a time, in order."""

    def __init__(
        self, source: HfSource, digests: FolderDigests | None, target: Target, plans: list[FilePlan], bar: Any
    ) -> None:
        self._source = source
        self._digests = digests
        self._target = target
        self._bar = bar
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._opened: list[_OpenShard] = []
        self._tensors = self._all_tensors(plans)

    def run(self, workers: int, devices: list[torch.device]) -> None:
        """Convert all shards; the first error stops every worker.

        Raises:
            ConfigError: the disk is full.
        """
        _keep_freed_memory()
        threads = torch.get_num_threads()
        if workers > 1:
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // workers))
        pool = ThreadPoolExecutor(workers, thread_name_prefix="convert")
        try:
            futures = [pool.submit(self._work, devices[index % len(devices)]) for index in range(workers)]
            for future in as_completed(futures):
                future.result()
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise ConfigError(
                f"the disk of {self._target.folder} is full; free some space and repeat the command, finished shards "
                "are kept"
            ) from error
        finally:
            self._stop.set()
            pool.shutdown()
            for shard in self._opened:
                shard.abandon()
            torch.set_num_threads(threads)

    def _all_tensors(self, plans: list[FilePlan]) -> Iterator[tuple[_OpenShard, TensorPlan]]:
        for plan in plans:
            shard = _OpenShard(plan, self._target)
            self._opened.append(shard)
            for tensor in plan.tensors:
                yield shard, tensor

    def _work(self, device: torch.device) -> None:
        try:
            with RowReader(device) as reader, reader.stream():
                while not self._stop.is_set():
                    with self._lock:
                        shard, tensor = next(self._tensors, (None, None))
                    if shard is None or tensor is None:
                        return
                    if not self._carry_out(shard, tensor, reader):
                        return
                    shard.tensor_done(self._source, self._digests)
                    with self._lock:
                        self._bar.update(tensor.source.num_bytes)
        except BaseException:
            self._stop.set()
            raise

    def _carry_out(self, shard: _OpenShard, tensor: TensorPlan, reader: RowReader) -> bool:
        """Write the outputs of one tensor; False when another worker's error stopped it halfway."""
        offsets, outputs = shard.plan.offsets, shard.plan.outputs
        if tensor.convert is not None:
            for name, first, rows in tensor.convert(reader):
                write_at(shard.descriptor, rows, offsets[name] + first * outputs[name].row_bytes)
                if self._stop.is_set():
                    return False
        elif tensor.outputs:
            stored = tensor.source
            copy_bytes(
                reader.descriptor(stored.file),
                stored.begin,
                shard.descriptor,
                offsets[tensor.outputs[0].name],
                stored.num_bytes,
            )
        return True
