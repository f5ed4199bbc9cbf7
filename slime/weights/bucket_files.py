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
        bucket: of the manifest; its pieces are whole tensors.
        manifest: of the push.

    Raises:
        WeightSyncError: the folder has another tensor under a name, or none, or the bucket wants a part of one; a
            file has become shorter.
    """
    flat = torch.empty(bucket.num_bytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
    view = flat.numpy().data
    for piece in bucket.pieces:
        entry = manifest.by_name[piece.name]
        stored = layout.get(piece.name)
        if stored is None or (stored.dtype, stored.shape) != (STORED_DTYPES.get(entry.dtype), entry.shape):
            found = "nothing" if stored is None else f"{stored.dtype} {list(stored.shape)} in {stored.file}"
            raise WeightSyncError(f"{piece.name} shall be {entry.dtype} {list(entry.shape)}, and on disk is {found}")
        if piece.shape != entry.shape:
            raise WeightSyncError(f"a bucket from disk wants the part {list(piece.shape)} of {piece.name}")
        _read_into(stored, view[piece.offset : piece.offset + entry.num_bytes])
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
