"""Who sends which rectangle of which tensor, and where in which bucket it lies: worked out alike on every rank.

Ranks that hold the same rectangle (data- and context-parallel replicas, the tensor-parallel ranks of a parameter that
is not cut, two pipeline stages with a tied embedding) share its bytes among them; none is sent twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from slime.utils.errors import ConfigError, WeightSyncError
from slime.weights.kernels.cast_table import Kind
from slime.weights.manifest import BucketEntry, Manifest, Piece, TensorEntry, align
from slime.weights.named_tensors import dtype_name

MIN_PIECE_BYTES = 1 << 20
"""Replicas share rectangles larger than this by cutting them."""
PIECES_PER_RANK = 16
"""Rectangles with several holders are cut to this part of a rank's fair share, so that the shares come out even."""

Header = tuple[str, tuple[int, ...], torch.dtype]
"""HF name, shape and dtype of a tensor as it travels."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A rectangle of one HF tensor that a rank can send.  What its replicas offer is equal."""

    name: str
    whole_shape: tuple[int, ...]
    dtype: torch.dtype
    """As it travels, unless it is quantized."""
    start: tuple[int, ...]
    shape: tuple[int, ...]
    cut_unit: int = 1
    """Rows: a cut leaves multiples of it on both sides where it can."""


@dataclass(frozen=True, slots=True)
class Part:
    """Rows ``begin .. end`` of a rank's offer, in one of its buckets."""

    offer: int
    """Position among the rank's offers."""
    begin: int
    end: int
    offset: int
    """First byte in the bucket."""
    scale_offset: int | None = None
    """First byte of the scales of a quantized part."""


@dataclass(frozen=True, slots=True)
class PlannedBucket:
    """One bucket of one rank."""

    index: int
    """In the manifest."""
    num_bytes: int
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class QuantizedBlocks:
    """The tensors that travel as eight-bit floats with one scale per block."""

    is_quantized: Callable[[str], bool]
    outputs: Callable[[str, tuple[int, ...]], list[Header]]
    """Name and shape of a tensor to what it travels as: the matrix, then its scales."""
    block: tuple[int, int] | None
    """Rows and columns; None when they are quantised in a way that rectangles are not."""
    kind: Kind = "fp8_block"


@dataclass
class _Share:
    """What one rank has been given so far."""

    num_bytes: int = 0
    parts: list[tuple[int, int, int]] = field(default_factory=list)
    """Offer, first row, last row + 1."""


@dataclass(frozen=True)
class ShardPlan:
    """Tensors, buckets, and per rank which buckets are its own.

    ``buckets[rank][turn]`` is what the rank sends in a turn; ranks of one group have the same number of turns but for
    the last ones.
    """

    manifest: Manifest
    buckets: tuple[tuple[PlannedBucket, ...], ...]
    groups: tuple[tuple[int, ...], ...]
    """Ranks that send at the same time, in the order in which the groups send."""

    @property
    def buffer_bytes(self) -> int:
        """Size of every rank's buffer: that of the largest bucket of any rank, rounded up."""
        return align(max((bucket.num_bytes for owned in self.buckets for bucket in owned), default=0))

    def num_turns(self, ranks: Iterable[int]) -> int:
        """Turns until all of these ranks have sent all that they have."""
        return max((len(self.buckets[rank]) for rank in ranks), default=0)


def plan_shards(
    offers: Sequence[Sequence[Offer]],
    *,
    bucket_bytes: int,
    blocks: QuantizedBlocks | None = None,
    groups: Sequence[Sequence[int]] | None = None,
) -> ShardPlan:
    """Share the rectangles among the ranks and lay each rank's into buckets.

    Args:
        offers: of every rank.
        bucket_bytes: the largest bucket; ``--update-weight-buffer-size``.
        blocks: what is quantized; None for nothing.
        groups: ranks that send at the same time, in the order in which the groups send; None for all at once.  Buckets
            are numbered by group, turn and rank.

    Raises:
        ConfigError: ``bucket_bytes`` is not positive.
        WeightSyncError: the offers of a tensor do not make up the whole of it.
    """
    if bucket_bytes <= 0:
        raise ConfigError(f"--update-weight-buffer-size is {bucket_bytes}; it must be a positive number of bytes")
    sizes = _Sizes(blocks)
    shares = _share(offers, sizes, bucket_bytes)
    drafts = [
        list(_pack(offered, share.parts, sizes, bucket_bytes)) for offered, share in zip(offers, shares, strict=True)
    ]
    groups = (tuple(range(len(offers))),) if groups is None else tuple(map(tuple, groups))
    entries: list[BucketEntry] = []
    owned: list[list[PlannedBucket]] = [[] for _ in offers]
    for ranks in groups:
        for turn in range(max((len(drafts[rank]) for rank in ranks), default=0)):
            for rank in ranks:
                if turn < len(drafts[rank]):
                    num_bytes, parts, pieces = drafts[rank][turn]
                    owned[rank].append(PlannedBucket(len(entries), num_bytes, tuple(parts)))
                    entries.append(BucketEntry(num_bytes, tuple(pieces)))
    tensors: dict[str, TensorEntry] = {}
    for offered in offers:
        for offer in offered:
            if offer.name not in tensors:
                for name, shape, dtype in sizes.outputs(offer):
                    tensors[name] = TensorEntry(name, shape, dtype_name(dtype))
    manifest = Manifest(tuple(tensors.values()), tuple(entries))
    return ShardPlan(manifest, tuple(map(tuple, owned)), groups)


class _Sizes:
    """Bytes of parts of offers."""

    def __init__(self, blocks: QuantizedBlocks | None) -> None:
        self._blocks = blocks

    def is_quantized(self, offer: Offer) -> bool:
        return self._blocks is not None and self._blocks.is_quantized(offer.name)

    def outputs(self, offer: Offer) -> list[Header]:
        if self._blocks is None or not self.is_quantized(offer):
            return [(offer.name, offer.whole_shape, offer.dtype)]
        return self._blocks.outputs(offer.name, offer.whole_shape)

    def pieces(self, offer: Offer, begin: int, end: int) -> list[tuple[str, torch.dtype, tuple[int, ...], tuple]]:
        """Name, dtype, start and shape of what rows ``begin .. end`` become: the matrix, and its scales."""
        start, shape = (offer.start[0] + begin, *offer.start[1:]), (end - begin, *offer.shape[1:])
        (name, _, dtype), *scales = self.outputs(offer)
        pieces = [(name, dtype, start, shape)]
        for scale_name, _, scale_dtype in scales:
            assert self._blocks is not None and self._blocks.block is not None
            block = self._blocks.block
            scale_start = tuple(s // step for s, step in zip(start, block, strict=True))
            scale_shape = tuple(-(-n // step) for n, step in zip(shape, block, strict=True))
            pieces.append((scale_name, scale_dtype, scale_start, scale_shape))
        return pieces

    def num_bytes(self, offer: Offer, begin: int, end: int) -> int:
        """In a bucket, with what aligns the next piece."""
        return sum(align(math.prod(shape) * dtype.itemsize) for _, dtype, _, shape in self.pieces(offer, begin, end))

    def cuts(self, offer: Offer, max_bytes: int) -> Iterator[tuple[int, int]]:
        """Row ranges of at most ``max_bytes``, or of the fewest rows that can be cut off where that is more.

        Cuts go through no run of rows, unless a run is too large.
        """
        num_rows = offer.shape[0]
        least = 1
        if self._blocks is not None and self._blocks.block is not None and self.is_quantized(offer):
            least = self._blocks.block[0]
        unit = math.lcm(least, offer.cut_unit)
        if offer.cut_unit % least == 0 and self.num_bytes(offer, 0, min(unit, num_rows)) > max_bytes:
            unit = least
        fitting = max(1, int(max_bytes / max(self.num_bytes(offer, 0, num_rows), 1) * num_rows) // unit)
        while fitting > 1 and self.num_bytes(offer, 0, min(fitting * unit, num_rows)) > max_bytes:
            fitting -= 1
        for begin in range(0, num_rows, fitting * unit):
            yield begin, min(begin + fitting * unit, num_rows)


def _share(offers: Sequence[Sequence[Offer]], sizes: _Sizes, bucket_bytes: int) -> list[_Share]:
    """Give every rectangle to one rank, or parts of it to several, the largest first and to who has least."""
    holders: dict[tuple[str, tuple[int, ...]], list[tuple[int, int]]] = {}
    for rank, offered in enumerate(offers):
        for position, offer in enumerate(offered):
            holders.setdefault((offer.name, offer.start), []).append((rank, position))
    total = 0
    for (name, _), held in holders.items():
        first = offers[held[0][0]][held[0][1]]
        total += sizes.num_bytes(first, 0, first.shape[0])
        for rank, position in held[1:]:
            if offers[rank][position] != first:
                raise WeightSyncError(
                    f"ranks {held[0][0]} and {rank} hold different parts of {name}: {first} and "
                    f"{offers[rank][position]}; replicas of a parameter must be cut alike"
                )
    fine = min(bucket_bytes, max(total // (PIECES_PER_RANK * len(offers)), MIN_PIECE_BYTES))
    shares = [_Share() for _ in offers]
    shared: list[tuple[int, int, int, list[tuple[int, int]]]] = []
    for held in holders.values():
        offer = offers[held[0][0]][held[0][1]]
        for begin, end in sizes.cuts(offer, bucket_bytes if len(held) == 1 else fine):
            size = sizes.num_bytes(offer, begin, end)
            if len(held) > 1:
                shared.append((size, begin, end, held))
                continue
            ((rank, position),) = held
            shares[rank].num_bytes += size
            shares[rank].parts.append((position, begin, end))
    shared.sort(key=lambda part: -part[0])  # stable: alike on every rank
    for size, begin, end, held in shared:
        rank, position = min(held, key=lambda holder: shares[holder[0]].num_bytes)
        shares[rank].num_bytes += size
        shares[rank].parts.append((position, begin, end))
    for share in shares:
        share.parts.sort()
    return shares


def _pack(
    offers: Sequence[Offer], parts: Sequence[tuple[int, int, int]], sizes: _Sizes, bucket_bytes: int
) -> Iterator[tuple[int, list[Part], list[Piece]]]:
    """A rank's parts, in their order, in buckets: bytes, parts and pieces of each."""
    end_of_last = 0
    placed: list[Part] = []
    pieces: list[Piece] = []
    for position, begin, end in parts:
        offer = offers[position]
        size = sizes.num_bytes(offer, begin, end)
        if placed and align(end_of_last) + size > bucket_bytes:
            yield end_of_last, placed, pieces
            end_of_last, placed, pieces = 0, [], []
        offsets = []
        for name, dtype, start, shape in sizes.pieces(offer, begin, end):
            offset = align(end_of_last)
            offsets.append(offset)
            pieces.append(Piece(name, offset, start, shape))
            end_of_last = offset + math.prod(shape) * dtype.itemsize
        placed.append(Part(position, begin, end, offsets[0], offsets[1] if len(offsets) > 1 else None))
    if placed:
        yield end_of_last, placed, pieces
