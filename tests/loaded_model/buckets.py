"""Tensors as the buckets of a push, for tests that are no trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from slime.weights.digest import combine, digest_bytes
from slime.weights.manifest import BucketEntry, Manifest, Piece, TensorEntry, align, pack_whole
from slime.weights.named_tensors import dtype_name

Cut = tuple[str, tuple[int, ...], tuple[int, ...]]
"""A rectangle of a tensor: name, first index, extents."""


def whole_buckets(tensors: Mapping[str, Tensor], num_buckets: int = 1) -> Manifest:
    """Whole tensors in their order, spread over buckets."""
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
    """As shards come: bucket ``i`` holds part ``i`` of every matrix, by rows and columns in turn; the rest whole."""
    cuts: list[list[Cut]] = [[] for _ in range(num_parts)]
    for number, (name, tensor) in enumerate(tensors.items()):
        dim = number % max(tensor.dim(), 1)
        if tensor.dim() < 2 or tensor.shape[dim] < num_parts:
            cuts[0].append((name, (0,) * tensor.dim(), tuple(tensor.shape)))
            continue
        edges = [tensor.shape[dim] * part // num_parts for part in range(num_parts + 1)]
        for part in range(num_parts):
            start, shape = [0] * tensor.dim(), list(tensor.shape)
            start[dim], shape[dim] = edges[part], edges[part + 1] - edges[part]
            cuts[part].append((name, tuple(start), tuple(shape)))
    return manifest_of(tensors, cuts)


def manifest_of(tensors: Mapping[str, Tensor], cuts: Sequence[Sequence[Cut]]) -> Manifest:
    """Buckets of the given rectangles."""
    entries = tuple(TensorEntry(name, tuple(t.shape), dtype_name(t.dtype)) for name, t in tensors.items())
    buckets = []
    for part in cuts:
        pieces, end = [], 0
        for name, start, shape in part:
            piece = Piece(name, align(end), start, shape)
            end = piece.offset + torch.Size(shape).numel() * tensors[name].element_size()
            pieces.append(piece)
        buckets.append(BucketEntry(end, tuple(pieces)))
    return Manifest(entries, tuple(buckets))


def fill(manifest: Manifest, tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """The flat buffer of every bucket."""
    flats = []
    for bucket in manifest.buckets:
        flat = torch.zeros(bucket.num_bytes, dtype=torch.uint8)
        for piece in bucket.pieces:
            part = tensors[piece.name]
            for dim, (begin, extent) in enumerate(zip(piece.start, piece.shape, strict=True)):
                part = part.narrow(dim, begin, extent)
            data = part.contiguous().view(-1).view(torch.uint8)
            flat[piece.offset : piece.offset + data.numel()] = data
        flats.append(flat)
    return flats


def digests(manifest: Manifest, flats: Sequence[Tensor]) -> list[str]:
    """What an engine that received these buffers acknowledges."""
    words = []
    for bucket, flat in zip(manifest.buckets, flats, strict=True):
        sizes = [torch.Size(p.shape).numel() * manifest.by_name[p.name].torch_dtype.itemsize for p in bucket.pieces]
        parts = [digest_bytes(flat[p.offset : p.offset + size]) for p, size in zip(bucket.pieces, sizes, strict=True)]
        words.append(f"{combine(parts):016x}")
    return words
