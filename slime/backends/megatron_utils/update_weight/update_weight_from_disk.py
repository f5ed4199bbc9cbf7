"""Push over a shared disk: the trainer writes a version as a Hugging Face folder, the engines read it.

    write (every rank its share) -> publish -> hook -> hosts pull their copies -> pause, flush, begin
        -> engines read the files -> acknowledge -> commit -> continue -> old versions go

Writing and pulling happen while the engines still serve.  With ``--update-weight-local-checkpoint-dir`` each host
copies the version to a disk of its own first, once for all its engines.  ``update_weight_from_disk_delta`` writes only
what changed.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slime.backends.megatron_utils import cpu_platform  # noqa: F401

# isort: split
from megatron.core import mpu

from slime.backends.megatron_utils import memory
from slime.backends.megatron_utils.update_weight.protocol import disk_steps, push_steps
from slime.backends.megatron_utils.update_weight.protocol.disk_steps import WrittenVersion
from slime.backends.megatron_utils.update_weight.protocol.push import Push, PushReport
from slime.backends.megatron_utils.update_weight.protocol.roster import PUSH_FAILURES, PushClock, Roster
from slime.backends.megatron_utils.update_weight.sender import WeightSender
from slime.backends.megatron_utils.update_weight.sources.bucket_source import NO_BUCKET
from slime.utils.distributed_utils import get_gloo_group
from slime.utils.errors import HookError, WeightSyncError
from slime.utils.misc import load_function
from slime.weights.hf_files import copy_assets
from slime.weights.manifest import BucketSlice
from slime.weights.receiver import WeightReceiver
from slime.weights.shares import Shares
from slime.weights.version_writer import (
    PartWriter,
    begin_version,
    explained_disk_errors,
    publish_version,
    require_space,
)
from slime.weights.versions import CHAIN, prune_before, remove_all, remove_version, version_folder, version_text

logger = logging.getLogger(__name__)

DISK_FLAG = "--update-weight-disk-dir"


class UpdateWeightFromDisk(WeightSender):
    """Whole versions.  The delta sender overrides what a rank writes, and what happens after a commit."""

    across_stages = False

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._root = Path(self.args.update_weight_disk_dir)
        stages: list[Any] = [None] * dist.get_world_size()
        place = (mpu.get_pipeline_model_parallel_rank(), dist.get_rank())
        dist.all_gather_object(stages, place, group=get_gloo_group())
        ranks = [rank for stage, rank in stages if stage == place[0]]
        self._shares = Shares(len(ranks), ranks.index(place[1]))
        """Who of the ranks of this pipeline stage, which all gather the same tensors, writes which."""
        self._is_source = (
            mpu.get_data_parallel_rank(with_context_parallel=True) == 0 and mpu.get_tensor_model_parallel_rank() == 0
        )
        self._chain = ""
        self._written: WrittenVersion | None = None
        """What lies in the folder, ready to be read once more."""
        self._is_doubted = self._must_rebuild = False
        """An engine did not hold what it read, or may not: the copy of its host is made anew when it is refilled."""
        self._fence_later: Mapping[int, str] = {}
        """Engines whose hosts have not got the version; on rank 0."""
        self._folders: Mapping[int, str] = {}
        """Where each engine reads, by its index; on rank 0."""
        self._num_changed = 0
        """Bytes of this rank's share that differ from the version before."""
        self.metrics: dict[str, float] = {}

    # What the base class asks for

    def connect(self, receivers: Sequence[WeightReceiver]) -> None:
        """Nothing to connect: the disk is the path."""

    def form_groups(self, push: Push) -> None:
        """No groups either."""

    def speaks_to(self, receiver: WeightReceiver) -> bool:
        """The source of a pipeline stage speaks to all engines."""
        return self._is_source

    def extra_metrics(self) -> dict[str, float]:
        """Bytes on the wire, and the part of the model's bytes that changed (1 for a whole model)."""
        return self.metrics

    def offer(self, push: Push, index: int, flat: Tensor) -> None:
        """Write this rank's share of a bucket."""
        bucket = self.source.manifest.buckets[index]
        by_name = self.source.manifest.by_name
        own = [part for part in bucket.slices if self._shares.is_own(part.name, by_name[part.name].num_bytes)]
        self._write_slices(own, flat)

    def _push(self) -> PushReport:
        """As the base class, with allocations outside the memory saver: the model may be asleep."""
        with memory.memory_saver_disabled():
            return super()._push()

    def resend_weights(self) -> PushReport:
        """As the base class; a copy that an engine could not be filled from is made anew."""
        self._must_rebuild = self._is_doubted
        try:
            return super().resend_weights()
        finally:
            self._must_rebuild = False

    def write_weights(self) -> WrittenVersion:
        """Write the present weights as the next version, and ask nothing of any engine: somebody else will.

        Raises:
            WeightSyncError: the disk is full or refuses, or the hook does.
        """
        self.weight_version += 1
        push = Push(str(self.weight_version), Roster(self.receivers), PushClock(self.timeout_s))
        try:
            with memory.memory_saver_disabled():
                return self._write_version(push)
        except WeightSyncError:
            self._give_up()
            raise

    def _run(self, push: Push) -> None:
        try:
            written = self._written
            if written is None or written.number != self.weight_version:
                written = self._write_version(push)
            push.digests = dict(written.digests)
            self.on_main_rank(push, "letting the engines' hosts fetch the weights", lambda: self._fetch(push, written))
            super()._run(push)
        except WeightSyncError:
            self._is_doubted = True
            self._give_up()
            raise
        self._is_doubted = bool(push.roster.reasons)
        self._after_commit(push)

    def _fetch(self, push: Push, written: WrittenVersion) -> None:
        fetching = Roster(self.receivers)
        self._folders = disk_steps.fetch(written, fetching, push.clock, rebuild=self._must_rebuild)
        self._fence_later = fetching.reasons

    def _publish(self, push: Push) -> None:
        """Let every engine read the version."""
        push.num_attempts = 1
        push.id = self._next_push_id(push.version)
        for index, reason in self._fence_later.items():  # they are paused by now, as a fenced engine must be
            push.roster.fence(index, reason)
        self.on_main_rank(push, "beginning the push", lambda: push_steps.begin(push, self.source.manifest))
        self.on_main_rank(
            push, f"reading version {push.version} from disk", lambda: disk_steps.read(push, self._folders)
        )

    # Writing; all ranks

    def _write_version(self, push: Push) -> WrittenVersion:
        """Write and publish the version with the weights of now; collective."""
        self._written = None
        if not self._chain:
            self._begin_chain(push)
        final = version_folder(self._root, self.weight_version)
        size = sum(tensor.num_bytes for tensor in self.source.manifest.tensors)
        self._prepare(push)
        num_bytes = self.assemble(push, final, lambda writer: self._write_all(push, writer), self._index(), size)
        self._written = WrittenVersion(
            root=self._root,
            number=self.weight_version,
            manifest=self.source.manifest,
            digests=push.digests,
            is_copied=self.args.update_weight_local_checkpoint_dir is not None,
            repacks=self._repacks_quantized_weights,
            metrics={
                "perf/update_weights_wire_bytes": float(num_bytes),
                "perf/update_weights_density": self._sum_over_ranks(self._num_changed) / max(size, 1),
            },
        )
        self.metrics = dict(self._written.metrics)
        if self.args.custom_update_weight_post_write_path is not None:
            self.run_together(push, "running --custom-update-weight-post-write-path", lambda: self._call_hook(final))
        return self._written

    def _begin_chain(self, push: Push) -> None:
        """Versions of this run count from here: what an earlier run left is removed."""
        is_first = not self.args.update_weight_start_version  # of the run's trainers, see --release-train

        def clear() -> None:
            with explained_disk_errors(self._root, DISK_FLAG):
                self._root.mkdir(parents=True, exist_ok=True)
                if is_first:
                    remove_all(self._root)

        self.on_main_rank(push, "clearing the folder of weight versions", clear)
        self._next_push_id(push.version)
        self._chain = self._name

    def _write_all(self, push: Push, writer: PartWriter) -> None:
        """Walk the buckets; after a failure on with the walk, because the other ranks gather with this one."""
        source, digests = self.source, self._digests
        assert digests is not None
        self._writer = writer
        with torch.no_grad():
            for index, flat in source.iter_buckets():
                if index == NO_BUCKET:
                    continue
                digests.take(index, flat)
                if not push.failures:
                    with self._failures_noted(push):
                        self.offer(push, index, flat)
        push.digests = digests.finish()

    def assemble(
        self,
        push: Push,
        final: Path,
        write: Callable[[PartWriter], None],
        metadata: Mapping[str, object],
        needed_bytes: int,
    ) -> int:
        """Make a version of what all ranks write; gives its bytes.  Collective; a failure leaves nothing behind."""
        begun = [""]
        is_whole = "delta_encoding" not in metadata

        def begin() -> None:
            with explained_disk_errors(self._root, DISK_FLAG):
                if is_whole:
                    require_space(self._root, needed_bytes, DISK_FLAG)
                begun[0] = str(begin_version(final))

        self.on_main_rank(push, f"beginning {final.name}", begin)
        dist.broadcast_object_list(begun, src=0, group=get_gloo_group())
        unfinished = Path(begun[0])
        try:
            writer = PartWriter(unfinished, dist.get_rank())
            write(writer)
            with self._failures_noted(push):
                writer.flush()
            self.meet(push, f"writing {final.name}")
            parts: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(parts, writer.files, group=get_gloo_group())

            def publish() -> None:
                with explained_disk_errors(self._root, DISK_FLAG):
                    if is_whole:
                        copy_assets(self.args.hf_checkpoint, unfinished)
                    publish_version(unfinished, final, parts, metadata, first=int(is_whole))

            self.on_main_rank(push, f"publishing {final.name}", publish)
        except WeightSyncError:
            if dist.get_rank() == 0:
                shutil.rmtree(unfinished, ignore_errors=True)
            raise
        return sum(file.num_bytes for files in parts for file in files)

    @contextmanager
    def _failures_noted(self, push: Push) -> Iterator[None]:
        """What goes wrong on this rank is raised at the next meeting, on all ranks."""
        try:
            with explained_disk_errors(self._root, DISK_FLAG):
                yield
        except PUSH_FAILURES as error:
            push.failures.append(error)

    def _sum_over_ranks(self, count: int) -> int:
        counts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(counts, count, group=get_gloo_group())
        return sum(counts)

    def _call_hook(self, folder: Path) -> None:
        """Plug-ins may raise anything.

        Raises:
            HookError: it did.
        """
        path = self.args.custom_update_weight_post_write_path
        engines = [getattr(receiver, "handle", receiver) for receiver in self.receivers]
        try:
            load_function(path)(self.args, str(folder), engines)
        except Exception as error:  # user's code
            raise HookError(f"--custom-update-weight-post-write-path {path} failed on {folder}: {error!r}") from error

    # What differs between whole versions and changes

    def _prepare(self, push: Push) -> None:
        """Before the first byte of a version is written; collective."""
        self._num_changed = 0

    def _index(self) -> dict[str, object]:
        """Metadata of the version's index."""
        return {"version": version_text(self.weight_version), CHAIN: self._chain}

    def _write_slices(self, slices: Sequence[BucketSlice], flat: Tensor) -> None:
        """Write whole tensors of a bucket."""
        by_name = self.source.manifest.by_name
        for part in slices:
            entry = by_name[part.name]
            data = flat[part.offset : part.offset + entry.num_bytes].to("cpu", copy=True)
            self._writer.add(part.name, as_tensor(data, entry.torch_dtype, entry.shape))
            self._num_changed += entry.num_bytes

    def _after_commit(self, push: Push) -> None:
        """The engines serve the version: it can go, unless one of them shall be refilled from it."""
        if self.args.update_weight_disk_keep_files:
            return
        is_read_again = bool(push.roster.reasons)
        if dist.get_rank() == 0:
            prune_before(self._root, self.weight_version + (not is_read_again))
        if not is_read_again:
            self._written = None

    def _give_up(self) -> None:
        """No engine serves the version: nobody shall find it."""
        if self._written is not None and dist.get_rank() == 0:
            remove_version(version_folder(self._root, self._written.number))
        self._written = None


def as_tensor(data: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """Flat bytes as a tensor."""
    return data.view(dtype).view(tuple(shape)) if data.numel() else torch.empty(tuple(shape), dtype=dtype)
