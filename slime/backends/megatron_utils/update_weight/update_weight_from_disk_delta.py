"""Push over a shared disk of what changed: each version holds the bytes that differ from the version before.

Version 0 is ``--hf-checkpoint``, which every engine host copies once; the first push tells how the trainer's weights
differ from it (after a resume they do).  Where its tensors are not those of the push (another dtype, other names), the
first version is whole instead.

Every rank keeps the bytes of its share as they were committed last; they move on only when engines serve the new ones.
When the changes on disk outgrow the model, a whole copy of the newest version is put beside them, and what is older is
removed: a host that missed versions starts from there, and none needs more reading than two models.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slime.backends.megatron_utils.update_weight.protocol.push import Push
from slime.backends.megatron_utils.update_weight.update_weight_from_disk import UpdateWeightFromDisk, as_tensor
from slime.utils.distributed_utils import get_gloo_group
from slime.utils.errors import DataError, WeightSyncError
from slime.weights.delta import COMPRESSION, EncodedDelta
from slime.weights.delta_base import DeltaBase
from slime.weights.manifest import BucketSlice, Manifest
from slime.weights.stored_tensors import STORED_DTYPES, StoredTensor, read_bytes, read_layout
from slime.weights.version_writer import PartWriter
from slime.weights.versions import prune_before, version_folder, version_text

logger = logging.getLogger(__name__)

MAX_WORKERS = 8


class UpdateWeightFromDiskDelta(UpdateWeightFromDisk):
    """Changes against the version committed last."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        args = self.args
        self._base = DeltaBase(encoding=args.update_weight_delta_encoding, checksum=args.update_weight_delta_checksum)
        self._stored: dict[str, StoredTensor] | None = None
        """Where the tensors of version 0 lie, until they are in the base."""
        self._base_version = 0
        self._is_next_whole = False
        self._chain_bytes = 0
        """Of the changes on disk since the last whole version."""
        num_ranks = max(args.actor_num_gpus_per_node, 1)
        self._workers = max(1, min(MAX_WORKERS, (os.cpu_count() or 1) // num_ranks))

    def _prepare(self, push: Push) -> None:
        super()._prepare(push)
        self._base.discard()
        if self._base_version == 0:
            self._look_at_version_0(push)

    def _look_at_version_0(self, push: Push) -> None:
        """Find out whether the first push can tell changes against ``--hf-checkpoint``; all ranks decide alike."""
        problem = ""
        try:
            self._stored = read_layout(self.args.hf_checkpoint)
            problem = find_mismatch(self._stored, self.source.manifest)
        except (DataError, OSError) as error:
            problem = str(error)
        problems: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(problems, problem, group=get_gloo_group())
        problem = next((found for found in problems if found), "")
        self._is_next_whole = bool(problem)
        if problem and dist.get_rank() == 0:
            logger.warning(
                "The first weight version is whole, because --hf-checkpoint cannot be its base: %s", problem
            )

    def _index(self) -> dict[str, object]:
        index = super()._index()
        if self._is_next_whole:
            return index
        return index | {
            "base_version": version_text(self._base_version),
            "delta_encoding": self.args.update_weight_delta_encoding,
            "compression_format": COMPRESSION,
            "checksum_format": self.args.update_weight_delta_checksum,
        }

    def _write_slices(self, slices: Sequence[BucketSlice], flat: Tensor) -> None:
        by_name = self.source.manifest.by_name
        if self._is_next_whole:
            super()._write_slices(slices, flat)
            for part in slices:
                size = by_name[part.name].num_bytes
                self._base.replace(part.name, flat[part.offset : part.offset + size].to("cpu", copy=True).numpy())
            return

        def encode(part: BucketSlice) -> EncodedDelta | None:
            size = by_name[part.name].num_bytes
            if part.name not in self._base and self._stored is not None:
                self._base.seed(part.name, read_bytes(self._stored[part.name]))
            return self._base.encode(part.name, flat[part.offset : part.offset + size].cpu().numpy())

        with ThreadPoolExecutor(self._workers) as pool:
            for part, encoded in zip(slices, pool.map(encode, slices), strict=True):
                if encoded is not None:
                    self._num_changed += encoded.num_changed
                    blob = torch.frombuffer(bytearray(encoded.blob), dtype=torch.uint8)
                    self._writer.add(part.name, blob, note=encoded.checksum)

    def _after_commit(self, push: Push) -> None:
        if self._base_version == self.weight_version:
            return  # engines that came late have got what the others had
        self.run_together(push, "moving the base of the next change", lambda: self._base.commit(self._workers))
        self._base_version, self._stored = self.weight_version, None
        size = sum(tensor.num_bytes for tensor in self.source.manifest.tensors)
        self._chain_bytes += int(self.metrics["perf/update_weights_wire_bytes"])
        if self.args.update_weight_disk_keep_files:
            return
        if self._is_next_whole or (self._chain_bytes > size and self._write_whole_copy(push, size)):
            self._is_next_whole, self._chain_bytes = False, 0
            if dist.get_rank() == 0:
                prune_before(self._root, self.weight_version)

    def _write_whole_copy(self, push: Push, size: int) -> bool:
        """Put the version committed last, whole, beside its changes; whether there was room for it."""
        by_name = self.source.manifest.by_name

        def write(writer: PartWriter) -> None:
            with self._failures_noted(push):
                for name, data in self._base.items():
                    writer.add(name, as_tensor(torch.from_numpy(data), by_name[name].torch_dtype, by_name[name].shape))

        try:
            folder = version_folder(self._root, self.weight_version, whole=True)
            self.assemble(push, folder, write, super()._index(), size)
        except WeightSyncError as error:
            if dist.get_rank() == 0:
                logger.warning(
                    "No whole copy of version %d, the changes go on growing: %s", self.weight_version, error
                )
            return False
        return True

    def _give_up(self) -> None:
        self._base.discard()
        if self._written is None or self._written.number != self._base_version:
            super()._give_up()


def find_mismatch(stored: dict[str, StoredTensor], manifest: Manifest) -> str:
    """Why the tensors of a model folder cannot be the base of changes; empty when they can."""
    for tensor in manifest.tensors:
        found = stored.get(tensor.name)
        if found is None:
            return f"it has no {tensor.name}"
        if (found.dtype, found.shape) != (STORED_DTYPES.get(tensor.dtype), tensor.shape):
            pushed = f"{tensor.dtype} {list(tensor.shape)}"
            return f"{tensor.name} is {found.dtype} {list(found.shape)} there, and is pushed as {pushed}"
    return ""
