"""Frames: the ledger's records as bytes, and reading them in order from segment files.

A frame has a header, a *head* (msgpack: the event, small enough to read millions) and a *blob* (tokens, log-probs and
everything else in a sample; readers that need only events skip it).

    magic u8 | kind u8 | head bytes u32 | blob bytes u32 | crc32 of head | of blob | of the header so far

Frames are only appended.  A killed process leaves at most one unfinished frame, at the end of its last segment: the
file ends before the frame does, and the reader ignores it.  Any other deviation from what was written is damage; the
ledger is read up to there, as if the run had been killed at that moment.

A segment that continues another begins with the other's size, and segment numbers have no gaps, so truncated and
missing files are detected too.
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
    """Return the number in a segment's file name."""
    return int(path.stem.removeprefix("segment-"))


class Kind(IntEnum):
    """The event that a record describes.  The numbers are stored on disk."""

    LIFE = 1
    """A process opened the journal; has its first rollout and its config fingerprint (head key ``facts``)."""
    BEGIN = 2
    """Generation of a rollout begins; this voids earlier records of it and of later rollouts."""
    ISSUED = 3
    """The data source returned these groups."""
    RESPONSE = 4
    """An engine returned the answer of one execution, complete or truncated."""
    FINISHED = 5
    """All executions of a group have answers and rewards."""
    FILTERED = 6
    """The group will not be trained on, for the given reason."""
    RETURNED = 7
    """Groups went back to the data source's buffer: unfinished, or finished surplus."""
    HANDED = 8
    """A group is part of a rollout's train data.  Takes effect once the rollout's BATCH follows."""
    BATCH = 9
    """The train data of a rollout is complete."""
    DISCARDED = 10
    """The rollout function neither handed over nor returned these groups."""
    TRAINED = 12
    """The trainer has trained on a rollout."""
    PUBLISHED = 14
    """The tracker names the checkpoint."""
    CONTINUED = 15
    """The segment continues the previous one, whose size in bytes is given."""
    DAMAGED = 17
    """Made by the reader, never stored: what follows is damaged (head key ``what``)."""


@dataclass(frozen=True, slots=True)
class Record:
    """A record read from a segment, without its blob, which stays on disk."""

    kind: Kind
    head: dict[str, Any]
    segment: Path
    blob_offset: int
    blob_bytes: int
    blob_crc: int

    def read_blob(self) -> bytes:
        """Read the blob from the file.

        Raises:
            DataError: the blob is truncated or does not match its checksum.
        """
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
    """Return a record as one frame."""
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
    """Read header and head of the frame at the file's position; None if the file ends before the frame does."""
    begin = file.tell()
    start = file.read(_FIXED.size)
    if start[0] != MAGIC:
        raise DataError("no record of this format version begins here")
    if begin + HEADER_BYTES > size:
        return None
    _, kind, head_bytes, blob_bytes, head_crc, blob_crc = _FIXED.unpack(start)
    # The header has its own checksum, so that a corrupted length does not look like an unfinished frame.
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
    """Return the path of segment ``number``."""
    return folder / f"segment-{number:08d}.led"


def segment_files(folder: Path) -> list[Path]:
    """Return the segments in order."""
    return sorted(folder.glob("segment-????????.led"))


def next_number(folder: Path) -> int:
    """Return a segment number above all in ``folder``."""
    return max(map(segment_number, segment_files(folder)), default=-1) + 1


def read_folder(folder: Path, *, first_segment: int = 0) -> Iterator[Record]:
    """Yield the records from segment ``first_segment`` on.

    If a file is damaged, truncated or missing, yields a DAMAGED record there and ends.
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
    """Return the total size of the segments in bytes."""
    return sum(path.lstat().st_size for path in segment_files(folder))
