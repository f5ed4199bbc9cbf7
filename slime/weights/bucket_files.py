"""A flat bucket of a push, put together from the safetensors files of a version."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from slime.utils.errors import WeightSyncError
from slime.weights.manifest import BucketEntry, Manifest
from slime.weights.stored_tensors import STORED_DTYPES, StoredTensor


def read_bucket(layout: Mapping[str, StoredTensor], bucket: BucketEntry, manifest: Manifest) -> Tensor:
    """The bucket's bytes on the host, in pinned memory where there is a GPU.

    Args:
        layout: what ``read_layout`` found in the folder of the version.
        bucket: of the manifest; its slices are whole tensors.
        manifest: of the push.

    Raises:
        WeightSyncError: the folder has another tensor under a name, or none, or the bucket wants a part of one; a
            file has become shorter.
    """
    flat = torch.empty(bucket.num_bytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
    view = flat.numpy().data
    for part in bucket.slices:
        entry = manifest.by_name[part.name]
        stored = layout.get(part.name)
        if stored is None or (stored.dtype, stored.shape) != (STORED_DTYPES.get(entry.dtype), entry.shape):
            found = "nothing" if stored is None else f"{stored.dtype} {list(stored.shape)} in {stored.file}"
            raise WeightSyncError(f"{part.name} shall be {entry.dtype} {list(entry.shape)}, and on disk is {found}")
        if part.slice.sizes != entry.shape:
            raise WeightSyncError(f"a bucket from disk wants the part {list(part.slice.sizes)} of {part.name}")
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
