"""The bytes of buckets as they come into a process of an engine: mapped, by broadcast, or from a folder."""

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
    """What one process needs to get at the bytes of a bucket, kept from push to push where it can be."""

    def __init__(self) -> None:
        self._mapped: dict[str, Tensor] = {}
        """Buffers of the trainer, by their handles."""
        self._used: set[str] = set()
        """Handles of the push under way."""
        self._folder: tuple[str, str] | None = None
        """The push, and the folder that it is read from."""
        self._layout: dict[str, StoredTensor] = {}
        """The places of the folder's tensors."""
        self._channels: dict[str, WeightChannel] = {}
        self._room: Tensor | None = None
        """For bytes that do not lie on this device: broadcasts, and buffers of other trainer ranks."""

    def begin(self) -> None:
        self._used = set()

    def release(self) -> None:
        """Let go of the buffers that the push did not use, and of memory that the KV cache may want."""
        # Shared memory is kept: torch ends the process that drops it when the trainer that made it is dead.
        self._mapped = {k: flat for k, flat in self._mapped.items() if k in self._used or flat.device.type == "cpu"}
        if not self._channels:
            self._room = None

    def map(self, handle: str) -> Tensor:
        from sglang.srt.utils import MultiprocessingSerializer

        if handle not in self._mapped:
            flat = MultiprocessingSerializer.deserialize(handle)
            if flat.device.type == "cpu":
                # Opening shared memory uses up the handle's own count of users, but other ranks and engines open the
                # same handle: give it back, so that the memory stays until the trainer lets go of it.
                flat.untyped_storage()._shared_incref()
            self._mapped[handle] = flat
        self._used.add(handle)
        return self._mapped[handle]

    def copy(
        self, flat: Tensor, ranges: Iterable[tuple[int, int]], manifest: Manifest, device: torch.device
    ) -> Tensor:
        """Return a copy on ``device`` of ranges of the bytes of a bucket.

        Memory of another process on another GPU can be copied from; kernels of this GPU cannot read it.
        """
        own = self._room_for(flat.numel(), manifest, device)
        for begin, end in ranges:
            own[begin:end].copy_(flat[begin:end], non_blocking=True)
        return own

    def receive(
        self, group_name: str, bucket: BucketEntry, manifest: Manifest, device: torch.device, timeout_s: float
    ) -> Tensor:
        if group_name not in self._channels:
            raise WeightSyncError(f"this engine is in no weight group {group_name!r}; call join_weight_group first")
        flat = self._room_for(bucket.num_bytes, manifest, device)
        self._channels[group_name].broadcast(flat, timeout_s)
        return flat

    def read(
        self, push_id: str, folder: str, bucket: BucketEntry, manifest: Manifest, positions: Iterable[int]
    ) -> Tensor:
        """Return a bucket with the slices at some positions, on the host, from the safetensors files in ``folder``."""
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
        """Have nobody wait in a group for this rank."""
        if name in self._channels:
            self._channels[name].abandon()

    def leave(self, name: str) -> None:
        """Leave a weight group; one that is not known is no error."""
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
    """Return the bucket with the bytes of some slices, on the host, in pinned memory on a machine with a GPU.

    Args:
        layout: what ``read_layout`` found in the folder of the version.

    Raises:
        WeightSyncError: the folder has another tensor under a name, or none; a file has become shorter.
    """
    flat = torch.empty(bucket.num_bytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
    view = flat.numpy().data
    for part in map(bucket.slices.__getitem__, positions):
        entry = manifest.by_name[part.name]
        stored = layout.get(part.name)
        if stored is None or (stored.dtype, stored.shape) != (STORED_DTYPES.get(entry.dtype), entry.shape):
            found = "nothing" if stored is None else f"{stored.dtype} {list(stored.shape)} in {stored.file}"
            raise WeightSyncError(f"{part.name} should be {entry.dtype} {list(entry.shape)}, and on disk is {found}")
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
