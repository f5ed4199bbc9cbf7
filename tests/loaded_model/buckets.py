"""Tensors as the buckets of a push, for tests without a trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from slime.ext.fast_push.manifest import BucketEntry, BucketSlice, Manifest, TensorEntry, align, pack_whole
from slime.weights.digest import combine, digest_bytes
from slime.weights.named_tensors import dtype_name
from slime.weights.tensor_slice import TensorSlice

NamedSlice = tuple[str, TensorSlice]
"""Name of a tensor, and a slice of it."""


def whole_buckets(tensors: Mapping[str, Tensor], num_buckets: int = 1) -> Manifest:
    """Whole tensors in order, distributed over buckets."""
    names = list(tensors)
    per_bucket = -(-len(names) // num_buckets)
    entries: list[TensorEntry] = []
    buckets: list[BucketEntry] = []
    for start in range(0, len(names), per_bucket):
        part = [(name, tuple(tensors[name].shape), tensors[name].dtype) for name in names[start : start + per_bucket]]
        described, bucket = pack_whole(part)
        entries += described
        buckets.append(bucket)
    return Manifest(tuple(entries), tuple(buckets))


def cut_buckets(tensors: Mapping[str, Tensor], num_parts: int = 2) -> Manifest:
    """Like shards: bucket ``i`` holds part ``i`` of every matrix, alternately by rows and columns; others are
    whole."""
    cuts: list[list[NamedSlice]] = [[] for _ in range(num_parts)]
    for number, (name, tensor) in enumerate(tensors.items()):
        dim = number % max(tensor.dim(), 1)
        if tensor.dim() < 2 or tensor.shape[dim] < num_parts:
            cuts[0].append((name, TensorSlice.whole(tensor.shape)))
            continue
        edges = [tensor.shape[dim] * part // num_parts for part in range(num_parts + 1)]
        for part in range(num_parts):
            start, shape = [0] * tensor.dim(), list(tensor.shape)
            start[dim], shape[dim] = edges[part], edges[part + 1] - edges[part]
            cuts[part].append((name, TensorSlice(tuple(start), tuple(shape))))
    return manifest_of(tensors, cuts)


def manifest_of(tensors: Mapping[str, Tensor], cuts: Sequence[Sequence[NamedSlice]]) -> Manifest:
    """Buckets of the given slices."""
    entries = tuple(TensorEntry(name, tuple(t.shape), dtype_name(t.dtype)) for name, t in tensors.items())
    buckets = []
    for part in cuts:
        pieces, end = [], 0
        for name, sliced in part:
            piece = BucketSlice(name, align(end), sliced)
            end = piece.offset + sliced.num_elements * tensors[name].element_size()
            pieces.append(piece)
        buckets.append(BucketEntry(end, tuple(pieces)))
    return Manifest(entries, tuple(buckets))


def fill(manifest: Manifest, tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """The flat buffer of every bucket."""
    flats = []
    for bucket in manifest.buckets:
        flat = torch.zeros(bucket.num_bytes, dtype=torch.uint8)
        for piece in bucket.slices:
            data = piece.slice.of(tensors[piece.name]).contiguous().view(-1).view(torch.uint8)
            flat[piece.offset : piece.offset + data.numel()] = data
        flats.append(flat)
    return flats


def digests(manifest: Manifest, flats: Sequence[Tensor]) -> list[str]:
    """The acknowledgement of an engine that received these buffers."""
    words = []
    for bucket, flat in zip(manifest.buckets, flats, strict=True):
        sizes = [p.slice.num_elements * manifest.by_name[p.name].torch_dtype.itemsize for p in bucket.slices]
        parts = [digest_bytes(flat[p.offset : p.offset + size]) for p, size in zip(bucket.slices, sizes, strict=True)]
        words.append(f"{combine(parts):016x}")
    return words
