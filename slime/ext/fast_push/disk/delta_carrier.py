"""Delta pushes over a shared disk: each version holds the bytes that differ from the previous version.

Version 0 is ``--hf-checkpoint``, which every engine host copies once; the first push is the difference between it and
the trainer's weights (after a resume they differ).  If its tensors have other dtypes or names than the pushed ones,
the first version is a full one instead.

Every rank keeps its share of the last committed version in host memory and replaces it only when engines serve the
next one.  When the deltas on disk outgrow the model, the trainer writes a full copy of the newest version beside them
and removes everything older.  A host that missed versions starts from the full copy, so no host reads more than two
models.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from slime.ext.fast_push.carrier import CarriedPush
from slime.ext.fast_push.disk.delta import COMPRESSION, DeltaBase, EncodedDelta
from slime.ext.fast_push.disk.disk import DiskCarrier, DiskOptions, as_tensor
from slime.ext.fast_push.disk.versions import PartWriter, version_folder, version_text
from slime.ext.fast_push.manifest import BucketSlice, Manifest
from slime.utils.errors import DataError, WeightSyncError
from slime.weights.push.state import TrainerRanks
from slime.weights.stored_tensors import STORED_DTYPES, StoredTensor, read_bytes, read_layout

logger = logging.getLogger(__name__)

MAX_WORKERS = 8


class DeltaCarrier(DiskCarrier):
    """Writes deltas relative to the version committed last."""

    def __init__(self, ranks: TrainerRanks, disk: DiskOptions) -> None:
        super().__init__(ranks, disk)
        self._base = DeltaBase(encoding=self.disk.encoding, checksum=self.disk.checksum)
        self._stored: dict[str, StoredTensor] | None = None
        """The tensors of version 0 on disk, until the base has read them."""
        self._base_version = 0
        self._is_next_whole = False
        self._chain_bytes = 0
        """Bytes of the deltas on disk since the last full version."""
        self._workers = max(1, min(MAX_WORKERS, (os.cpu_count() or 1) // max(self.ranks.ranks_per_host, 1)))

    def _begin_write(self, manifest: Manifest) -> None:
        self._base.discard()
        if self._base_version == 0:
            self._read_version_0(manifest)

    def _read_version_0(self, manifest: Manifest) -> None:
        """Decide on all ranks together whether the first push can be a delta relative to ``--hf-checkpoint``."""
        problem = ""
        try:
            self._stored = read_layout(self.disk.model)
            problem = find_mismatch(self._stored, manifest)
        except (DataError, OSError) as error:
            problem = str(error)
        problem = next((found for found in self.ranks.gather(problem) if found), "")
        self._is_next_whole = bool(problem)
        if problem and self.ranks.rank == 0:
            logger.warning(
                "The first weight version is a full one, because --hf-checkpoint cannot be its base: %s", problem
            )

    def _index(self, number: int) -> dict[str, object]:
        index = super()._index(number)
        if self._is_next_whole:
            return index
        return index | {
            "base_version": version_text(self._base_version),
            "delta_encoding": self.disk.encoding,
            "compression_format": COMPRESSION,
            "checksum_format": self.disk.checksum,
        }

    def _write_slices(
        self, writer: PartWriter, slices: Sequence[BucketSlice], flat: Tensor, manifest: Manifest
    ) -> None:
        def bytes_of(part: BucketSlice) -> Tensor:
            return flat[part.offset : part.offset + manifest.by_name[part.name].num_bytes]

        if self._is_next_whole:
            super()._write_slices(writer, slices, flat, manifest)
            for part in slices:
                self._base.replace(part.name, bytes_of(part).to("cpu", copy=True).numpy())
            return

        def encode(part: BucketSlice) -> EncodedDelta | None:
            if part.name not in self._base and self._stored is not None:
                self._base.seed(part.name, read_bytes(self._stored[part.name]))
            return self._base.encode(part.name, bytes_of(part).cpu().numpy())

        with ThreadPoolExecutor(self._workers) as pool:
            for part, encoded in zip(slices, pool.map(encode, slices), strict=True):
                if encoded is not None:
                    self._num_changed += encoded.num_changed
                    blob = torch.frombuffer(bytearray(encoded.blob), dtype=torch.uint8)
                    writer.add(part.name, blob, note=encoded.checksum)

    def _after_commit(self, push: CarriedPush) -> None:
        number, written = int(push.version), self.written
        if self._base_version == number or written is None:
            return  # a resend to late engines: the base is committed already
        push.run_together("advancing the base of the next delta", lambda: self._base.commit(self._workers))
        self._base_version, self._stored = number, None
        size = sum(tensor.num_bytes for tensor in written.manifest.tensors)
        self._chain_bytes += int(written.metrics["perf/update_weights_wire_bytes"])
        was_whole, self._is_next_whole = self._is_next_whole, False
        if self.disk.keeps_files:
            return
        if was_whole or (self._chain_bytes > size and self._write_whole_copy(push, written.manifest, size)):
            self._chain_bytes = 0
            self._prune(number)

    def _write_whole_copy(self, push: CarriedPush, manifest: Manifest, size: int) -> bool:
        """Write a full copy of the version committed last beside its delta; return whether there was room for it."""

        def write(writer: PartWriter) -> None:
            with self.failures_recorded(push):
                for name, data in self._base.items():
                    entry = manifest.by_name[name]
                    writer.add(name, as_tensor(torch.from_numpy(data), entry.torch_dtype, entry.shape))

        number = int(push.version)
        try:
            folder = version_folder(self.disk.root, number, whole=True)
            self.assemble(push, folder, write, super()._index(number), size)
        except WeightSyncError as error:
            push.failures.clear()
            if self.ranks.rank == 0:
                logger.warning("No full copy of version %d; deltas keep accumulating: %s", number, error)
            return False
        return True

    def _discard(self) -> None:
        self._base.discard()
        if self.written is None or self.written.number != self._base_version:
            super()._discard()


def find_mismatch(stored: dict[str, StoredTensor], manifest: Manifest) -> str:
    """Return why a model folder's tensors cannot be the base of deltas; empty if they can."""
    for tensor in manifest.tensors:
        found = stored.get(tensor.name)
        if found is None:
            return f"it has no {tensor.name}"
        if (found.dtype, found.shape) != (STORED_DTYPES.get(tensor.dtype), tensor.shape):
            pushed = f"{tensor.dtype} {list(tensor.shape)}"
            return f"{tensor.name} is {found.dtype} {list(found.shape)} there, and is pushed as {pushed}"
    return ""


def make_carrier(mode: str, ranks: TrainerRanks, options: DiskOptions) -> DiskCarrier:
    """Create the carrier that ``--update-weight-mode`` selects."""
    return (DeltaCarrier if mode == "delta" else DiskCarrier)(ranks, options)
