"""Frames: the records of the ledger as bytes, and the segment files that hold them, read in order.

A frame is a header, a *head* (msgpack: what happened, small enough to be read by the million) and a *blob* (tokens,
log-probs and everything else a sample holds; readers of events alone seek over it).

    magic u8 | kind u8 | head bytes u32 | blob bytes u32 | crc32 of head | of blob | of the header so far

Frames are only appended.  A process that is killed leaves at most one unfinished frame, at the end of its last
segment: the file ends before the frame does, and the reader passes over it.  Anything else that is not as it was
written is damage, and the ledger is read up to there, as if the run had been killed at that moment.

A segment that continues another one begins with the size of that one, and numbers have no gaps: so a file that was cut
short or is gone is found, too.
"""

from __future__ import annotations

import logging
import os
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import IO, Any

import msgspec

from slime.utils.errors import DataError
from slime.utils.files import opened

logger = logging.getLogger(__name__)

MAGIC = 0xA8
_FIXED = struct.Struct("<BBIIII")
_CRC = struct.Struct("<I")
HEADER_BYTES = _FIXED.size + _CRC.size


def segment_number(path: Path) -> int:
    """Return the number in the name of a segment."""
    return int(path.stem.removeprefix("segment-"))


class Kind(IntEnum):
    """The event that a record tells of.  The numbers are on disk."""

    LIFE = 1
    """A process opened the journal: the rollout it starts at, and its config fingerprint (head key ``facts``)."""
    BEGIN = 2
    """A rollout is generated; earlier records of it and of later rollouts no longer count."""
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
    """Groups that the rollout function neither handed over nor returned."""
    TRAINED = 12
    """The optimizer took the steps of a rollout."""
    PUBLISHED = 14
    """The tracker names the checkpoint."""
    CONTINUED = 15
    """The segment goes on where another one, of so many bytes, ends."""
    DAMAGED = 17
    """Found by the reader, and never on disk: what follows is not as it was written (head key ``what``)."""


@dataclass(frozen=True, slots=True)
class Record:
    """A record as read from a segment; the blob stays on disk."""

    kind: Kind
    head: dict[str, Any]
    segment: Path
    blob_offset: int
    blob_bytes: int
    blob_crc: int

    def read_blob(self) -> bytes:
        """Read the blob from the file."""
        if not self.blob_bytes:
            return b""
        with open(self.segment, "rb") as file:
            file.seek(self.blob_offset)
            blob = file.read(self.blob_bytes)
        if len(blob) != self.blob_bytes or zlib.crc32(blob) != self.blob_crc:
            raise DataError(f"The ledger's {self.segment} is damaged at byte {self.blob_offset}.")
        return blob


encode_value = msgspec.msgpack.Encoder().encode
"""Plain value -> msgpack."""
decode_value = msgspec.msgpack.Decoder().decode
"""msgpack -> plain value."""
_decode_head = msgspec.msgpack.Decoder(dict).decode


def pack_frame(kind: Kind, head: Mapping[str, Any], blob: bytes = b"") -> bytes:
    """Return one frame."""
    body = encode_value(head)
    fixed = _FIXED.pack(MAGIC, kind, len(body), len(blob), zlib.crc32(body), zlib.crc32(blob))
    return b"".join((fixed, _CRC.pack(zlib.crc32(fixed)), body, blob))


def _records(file: IO[bytes], path: Path) -> Iterator[Record]:
    """Yield the records of one file."""
    size, offset = os.fstat(file.fileno()).st_size, 0
    while offset < size:
        file.seek(offset)
        try:
            record = _read_frame(file, path, size)
        except DataError as error:
            raise DataError(f"at byte {offset}: {error}") from error
        if record is None:
            logger.info("%s: the last %d bytes are an unfinished record and are not read.", path, size - offset)
            return
        yield record
        offset = record.blob_offset + record.blob_bytes


def _read_frame(file: IO[bytes], path: Path, size: int) -> Record | None:
    """Read header and head of the frame at the present place; None when the file ends before the frame does."""
    begin = file.tell()
    start = file.read(_FIXED.size)
    if start[0] != MAGIC:
        raise DataError("no record of this version begins here")
    if begin + HEADER_BYTES > size:
        return None
    _, kind, head_bytes, blob_bytes, head_crc, blob_crc = _FIXED.unpack(start)
    # With a checksum for itself, so that no flipped length looks like an unfinished frame.
    if file.read(_CRC.size) != _CRC.pack(zlib.crc32(start)):
        raise DataError("the header of a record differs from its checksum")
    blob_offset = begin + HEADER_BYTES + head_bytes
    if blob_offset + blob_bytes > size:
        return None
    body = file.read(head_bytes)
    if zlib.crc32(body) != head_crc:
        raise DataError("the head of a record differs from its checksum")
    try:
        return Record(Kind(kind), _decode_head(body), path, blob_offset, blob_bytes, blob_crc)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise DataError(f"the head of a record cannot be decoded ({error})") from error


def segment_path(folder: Path, number: int) -> Path:
    """Return the file of segment ``number``."""
    return folder / f"segment-{number:08d}.led"


def segment_files(folder: Path) -> list[Path]:
    """Return the segments in order."""
    return sorted(folder.glob("segment-????????.led"))


def next_number(folder: Path) -> int:
    """Return a segment number that was never used in ``folder``."""
    return max(map(segment_number, segment_files(folder)), default=-1) + 1


def read_folder(folder: Path, *, first_segment: int = 0) -> Iterator[Record]:
    """Yield the records from segment ``first_segment`` on.

    Where a file is damaged, cut or missing comes a DAMAGED, and nothing after it.
    """
    before: Path | None = None
    for path in segment_files(folder):
        if segment_number(path) < first_segment:
            continue
        place = path
        try:
            if before is not None and segment_number(path) != segment_number(before) + 1:
                place = segment_path(folder, segment_number(before) + 1)
                raise DataError("at byte 0: the file is missing")
            with opened(path) as file:
                for record in _records(file, path):
                    if record.kind is Kind.CONTINUED and before is not None:
                        size, written = before.stat().st_size, record.head["bytes"]
                        if size != written:
                            place = before
                            raise DataError(f"at byte {size}: it should have {written} bytes")
                    yield record
        except (OSError, DataError) as error:
            yield Record(Kind.DAMAGED, {"what": f"{place.name} {error}"}, place, 0, 0, 0)
            return
        before = path


def folder_bytes(folder: Path) -> int:
    """Return the number of bytes that ``read_folder`` passes over."""
    return sum(path.lstat().st_size for path in segment_files(folder))
