"""What the ledger writes down, and how one record lies in a segment file.

A record is a frame: a header of 20 bytes, a *head* (msgpack: what happened, small enough to be read by the million)
and a *blob* (tokens, log-probs and what else a sample holds; readers that only ask what happened seek over it).

    magic u8 | kind u8 | flags u16 | head bytes u32 | blob bytes u32 | crc32 of header and head | crc32 of blob

Frames are only ever appended.  A process that is killed leaves at most one unfinished frame, at the end of its last
segment: the reader stops there.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import msgspec

from slime.utils.errors import DataError

MAGIC = 0x5C
HEADER = struct.Struct("<BBHIIII")
STRIPPED = 1
"""Flag: compaction dropped the blob; the head is all that is left."""
MAX_HEAD_BYTES = 1 << 28


class Kind(IntEnum):
    """What happened."""

    LIFE = 1
    """A process opened the ledger: the rollout it starts at, and the flags that decide what a group is."""
    BEGIN = 2
    """A rollout is generated; what an earlier process noted about it or later ones no longer counts."""
    ISSUED = 3
    """The data source was asked for groups and gave these."""
    RESPONSE = 4
    """An engine returned the answer of one execution, whole or cut off."""
    FINISHED = 5
    """All executions of a group are answered and rewarded."""
    FILTERED = 6
    """The group will not be trained, for the reason given."""
    RETURNED = 7
    """Groups went back to the data source's buffer: unfinished, or finished surplus."""
    HANDED = 8
    """A group is part of a rollout's train data.  Counts once the rollout's BATCH follows."""
    BATCH = 9
    """The train data of a rollout is complete."""
    DISCARDED = 10
    """Groups that the rollout function neither gave back nor returned."""
    REPLAYED = 11
    """A rollout's train data was taken from the ledger, not generated."""
    TRAINED = 12
    """The optimizer took the steps of a rollout."""
    SAVED = 13
    """A checkpoint's data position was written; it begins to count with PUBLISHED."""
    PUBLISHED = 14
    """The tracker names the checkpoint."""


@dataclass(frozen=True, slots=True)
class Record:
    """A record as it was found."""

    kind: Kind
    head: dict[str, Any]
    segment: Path
    blob_offset: int
    blob_bytes: int
    blob_crc: int
    is_stripped: bool = False

    def read_blob(self) -> bytes:
        """The blob, read again from the file.

        Raises:
            DataError: it is damaged, or compaction has dropped it.
        """
        if self.is_stripped:
            raise DataError(f"The ledger keeps no tokens of {self.kind.name} in {self.segment}: it was compacted.")
        with open(self.segment, "rb") as file:
            file.seek(self.blob_offset)
            blob = file.read(self.blob_bytes)
        if len(blob) != self.blob_bytes or zlib.crc32(blob) != self.blob_crc:
            raise DataError(f"The ledger's {self.segment} is damaged at byte {self.blob_offset}.")
        return blob


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(dict).decode


def pack_frame(kind: Kind, head: Mapping[str, Any], blob: bytes = b"", *, flags: int = 0) -> bytes:
    """One frame."""
    body = _encode(head)
    blob_crc = zlib.crc32(blob)
    start = HEADER.pack(MAGIC, kind, flags, len(body), len(blob), 0, blob_crc)
    crc = zlib.crc32(body, zlib.crc32(start))
    return HEADER.pack(MAGIC, kind, flags, len(body), len(blob), crc, blob_crc) + body + blob


@dataclass(frozen=True, slots=True)
class Header:
    """The fixed part of a frame."""

    kind: Kind
    flags: int
    head_bytes: int
    blob_bytes: int
    head_crc: int
    blob_crc: int

    @classmethod
    def parse(cls, data: bytes) -> Header | None:
        """The header; None when these are not the first bytes of a frame."""
        if len(data) != HEADER.size:
            return None
        magic, kind, flags, head_bytes, blob_bytes, head_crc, blob_crc = HEADER.unpack(data)
        if magic != MAGIC or head_bytes > MAX_HEAD_BYTES:
            return None
        try:
            return cls(Kind(kind), flags, head_bytes, blob_bytes, head_crc, blob_crc)
        except ValueError:
            return None

    def decode_head(self, head: bytes) -> dict[str, Any] | None:
        """The head; None when it is cut off or damaged."""
        start = HEADER.pack(MAGIC, self.kind, self.flags, self.head_bytes, self.blob_bytes, 0, self.blob_crc)
        if len(head) != self.head_bytes or zlib.crc32(head, zlib.crc32(start)) != self.head_crc:
            return None
        return _decode(head)


encode_value = _encode
"""Plain value -> msgpack."""
decode_value = msgspec.msgpack.Decoder().decode
"""msgpack -> plain value."""
