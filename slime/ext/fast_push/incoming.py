"""How an engine process obtains the bytes of buckets: by mapping, by broadcast, or from a folder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from slime.ext.fast_push.channel import WeightChannel
from slime.ext.fast_push.loader_report import rank_in_engine
from slime.ext.fast_push.manifest import BucketEntry, Manifest
from slime.utils.errors import WeightSyncError
from slime.weights.stored_tensors import STORED_DTYPES, StoredTensor, read_layout


class IncomingBytes:
    """One process's access to bucket bytes; mappings, groups and memory are reused across pushes where possible."""

    def __init__(self) -> None:
        self._mapped: dict[str, Tensor] = {}
        """Handle -> mapped buffer of the trainer."""
        self._used: set[str] = set()
        """Handles used in the current push."""
        self._folder: tuple[str, str] | None = None
        """The push id and the folder that the push is read from."""
        self._layout: dict[str, StoredTensor] = {}
        """Locations of the folder's tensors."""
        self._channels: dict[str, WeightChannel] = {}
        self._room: Tensor | None = None
        """Device memory for bytes from elsewhere: broadcasts, and buffers of other trainer ranks."""

    def begin(self) -> None:
        self._used = set()

    def release(self) -> None:
        """Release buffers that the push did not use, and memory that the KV cache may need."""
        # Shared memory is kept: if the trainer that made it is dead, torch ends the process that drops it.
        self._mapped = {k: flat for k, flat in self._mapped.items() if k in self._used or flat.device.type == "cpu"}
        if not self._channels:
            self._room = None

    def map(self, handle: str) -> Tensor:
        from sglang.srt.utils import MultiprocessingSerializer

        if handle not in self._mapped:
            flat = MultiprocessingSerializer.deserialize(handle)
            if flat.device.type == "cpu":
                # Opening shared memory consumes the handle's reference, but other ranks and engines open the same
                # handle.  Restore the reference, so that the memory stays until the trainer releases it.
                flat.untyped_storage()._shared_incref()
            self._mapped[handle] = flat
        self._used.add(handle)
        return self._mapped[handle]

    def copy(
        self, flat: Tensor, ranges: Iterable[tuple[int, int]], manifest: Manifest, device: torch.device
    ) -> Tensor:
        """Copy byte ranges of a bucket to ``device``.

        Needed because memory of another process on another GPU can be copied, but not read by this GPU's kernels.
        """
        own = self._room_for(flat.numel(), manifest, device)
        for begin, end in ranges:
            own[begin:end].copy_(flat[begin:end], non_blocking=True)
        return own

    def receive(
        self, group_name: str, bucket: BucketEntry, manifest: Manifest, device: torch.device, timeout_s: float
    ) -> Tensor:
        if group_name not in self._channels:
            raise WeightSyncError(f"this engine is not in weight group {group_name!r}; call join_weight_group first")
        flat = self._room_for(bucket.num_bytes, manifest, device)
        self._channels[group_name].broadcast(flat, timeout_s)
        return flat

    def read(
        self, push_id: str, folder: str, bucket: BucketEntry, manifest: Manifest, positions: Iterable[int]
    ) -> Tensor:
        """Read the slices at ``positions`` of a bucket from the safetensors files in ``folder`` into host memory."""
        if self._folder != (push_id, folder):
            self._folder, self._layout = (push_id, folder), read_layout(folder)
        return read_bucket(self._layout, bucket, manifest, positions)

    def join(self, name: str, group: dict[str, Any], timeout_s: float) -> None:
        self.leave(name)
        self._channels[name] = WeightChannel(
            group["master_address"],
            group["master_port"],
            rank=group["rank_offset"] + rank_in_engine(),
            world_size=group["world_size"],
            backend=group["backend"],
            timeout_s=timeout_s,
        )

    def abandon(self, name: str) -> None:
        """Abandon a group, so that no member waits for this rank."""
        if name in self._channels:
            self._channels[name].abandon()

    def leave(self, name: str) -> None:
        """Leave a weight group; not an error if it is unknown."""
        channel = self._channels.pop(name, None)
        if channel is not None:
            channel.leave()
        if not self._channels:
            self._room = None

    def _room_for(self, num_bytes: int, manifest: Manifest, device: torch.device) -> Tensor:
        largest = max(entry.num_bytes for entry in manifest.buckets)
        if self._room is None or self._room.numel() < largest:
            self._room = torch.empty(largest, dtype=torch.uint8, device=device)
        return self._room[:num_bytes]


def read_bucket(
    layout: Mapping[str, StoredTensor], bucket: BucketEntry, manifest: Manifest, positions: Iterable[int]
) -> Tensor:
    """Return a host buffer of the bucket with the slices at ``positions`` filled in; pinned if there is a GPU.

    Args:
        layout: the result of ``read_layout`` for the version's folder.

    Raises:
        WeightSyncError: the folder has no tensor, or a different one, under a name; or a file was truncated.
    """
    flat = torch.empty(bucket.num_bytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
    view = flat.numpy().data
    for part in map(bucket.slices.__getitem__, positions):
        entry = manifest.by_name[part.name]
        stored = layout.get(part.name)
        if stored is None or (stored.dtype, stored.shape) != (STORED_DTYPES.get(entry.dtype), entry.shape):
            found = "nothing" if stored is None else f"{stored.dtype} {list(stored.shape)} in {stored.file}"
            raise WeightSyncError(f"{part.name} should be {entry.dtype} {list(entry.shape)}, but on disk is {found}")
        _read_into(stored, view[part.offset : part.offset + entry.num_bytes])
    return flat


def _read_into(stored: StoredTensor, target: memoryview) -> None:
    with stored.file.open("rb", buffering=0) as file:
        file.seek(stored.begin)
        done = 0
        while done < len(target):
            count = file.readinto(target[done:])
            if not count:
                raise WeightSyncError(f"{stored.file} ended {len(target) - done} bytes early")
            done += count
