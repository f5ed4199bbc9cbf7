"""Frames: the records of the ledger as bytes, and the segment files that hold them, read in order.

A frame is a header of 24 bytes, a *head* (msgpack: what happened, small enough to be read by the million) and a *blob*
(tokens, log-probs and everything else a sample holds; readers of events alone seek over it).

    magic u8 | kind u8 | flags u16 | head bytes u32 | blob bytes u32 | crc32 of head | of blob | of the header so far

Frames are only appended.  A process that is killed leaves at most one unfinished frame, at the end of its last
segment: the file ends before the frame does, and the reader passes over it.  Anything else that is not as it was
written is damage; the header has a checksum of its own, so that no flipped length looks like an unfinished frame.

A segment that continues another one begins with the size of that one, and numbers have no gaps: a file that was cut
short or is gone is told like a flipped byte.
"""

from __future__ import annotations

import contextlib
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

MAGIC = 0xA7
_FIXED = struct.Struct("<BBHIIII")
_CRC = struct.Struct("<I")
HEADER_BYTES = _FIXED.size + _CRC.size
MAX_HEAD_BYTES = 1 << 28


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
    """Bytes here are not as they were written: found by the reader, and never on disk."""


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
        """Read the blob from the file.

        Raises:
            DataError: it is damaged.
        """
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
    fixed = _FIXED.pack(MAGIC, kind, 0, len(body), len(blob), zlib.crc32(body), zlib.crc32(blob))
    return b"".join((fixed, _CRC.pack(zlib.crc32(fixed)), body, blob))


class _UnfinishedError(Exception):
    """The file ends before the frame does."""


def read_segment(path: Path, *, verify_blobs: bool = False) -> Iterator[Record]:
    """Yield the records of one file; where it is damaged, a record DAMAGED, and nothing that follows.

    Args:
        path: of the file.
        verify_blobs: read the blobs, too; a damaged one is told after its record, and the reading continues.
    """
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(opened(path))
        except (OSError, DataError) as error:
            yield damage(path, 0, str(error), is_gap=True)
            return
        size, offset = os.fstat(file.fileno()).st_size, 0
        while offset < size:
            try:
                record = _read_frame(file, path, size)
            except _UnfinishedError:
                logger.info("%s: the last %d bytes are an unfinished record and are not read.", path, size - offset)
                break
            except DataError as error:
                yield damage(path, offset, str(error), is_gap=True)
                break
            yield record
            if verify_blobs:
                try:
                    record.read_blob()
                except DataError:
                    yield damage(path, record.blob_offset, "the samples differ from their checksum", is_gap=False)
            offset = record.blob_offset + record.blob_bytes
            file.seek(offset)


def damage(path: Path, offset: int, reason: str, *, is_gap: bool) -> Record:
    """Return the record that says where a file is damaged.

    Args:
        is_gap: True when records are missing; False when only the samples of one are.
    """
    head = {"file": path.name, "byte": offset, "reason": reason, "is_gap": is_gap}
    return Record(Kind.DAMAGED, head, path, offset, 0, 0)


def describe_damage(record: Record) -> str:
    """Return the place and the kind of a damage, for a log line or a report."""
    return f"{record.head['file']} at byte {record.head['byte']}: {record.head['reason']}"


def _read_frame(file: IO[bytes], path: Path, size: int) -> Record:
    """Read the header and the head of the frame at the present place.

    Raises:
        DataError: they are not as they were written.
    """
    begin = file.tell()
    start = file.read(_FIXED.size)
    if start[0] != MAGIC:
        raise DataError("no record begins here")
    if begin + HEADER_BYTES > size:
        raise _UnfinishedError
    _, kind, _, head_bytes, blob_bytes, head_crc, blob_crc = _FIXED.unpack(start)
    if file.read(_CRC.size) != _CRC.pack(zlib.crc32(start)):
        raise DataError("the header of a record differs from its checksum")
    if head_bytes > MAX_HEAD_BYTES or kind not in _KINDS:
        raise DataError(f"a record of kind {kind} with a head of {head_bytes} bytes is unknown to this version")
    blob_offset = begin + HEADER_BYTES + head_bytes
    if blob_offset > size:
        raise _UnfinishedError
    body = file.read(head_bytes)
    if zlib.crc32(body) != head_crc:
        raise DataError("the head of a record differs from its checksum")
    if blob_offset + blob_bytes > size:
        raise _UnfinishedError
    try:
        head = _decode_head(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise DataError(f"the head of a record cannot be decoded ({error})") from error
    return Record(Kind(kind), head, path, blob_offset, blob_bytes, blob_crc)


_KINDS = frozenset(Kind)


def segment_path(folder: Path, number: int) -> Path:
    """Return the file of segment ``number``."""
    return folder / f"segment-{number:08d}.led"


def segment_files(folder: Path) -> list[Path]:
    """Return the segments in order."""
    return sorted(folder.glob("segment-????????.led"))


def next_number(folder: Path) -> int:
    """Return a segment number that was never used in ``folder``."""
    return max(map(segment_number, segment_files(folder)), default=-1) + 1


def read_folder(folder: Path, *, first_segment: int = 0, verify_blobs: bool = False) -> Iterator[Record]:
    """Yield the records from segment ``first_segment`` on.  Where a file is damaged, cut or missing comes a DAMAGED.

    Args:
        folder: of the ledger.
        first_segment: where to begin.
        verify_blobs: see ``read_segment``.
    """
    before: Path | None = None
    for path in segment_files(folder):
        if segment_number(path) < first_segment:
            continue
        if before is not None and segment_number(path) != segment_number(before) + 1:
            missing = segment_path(folder, segment_number(before) + 1)
            yield damage(missing, 0, "the file is missing", is_gap=True)
            before = None
        for record in read_segment(path, verify_blobs=verify_blobs):
            if record.kind is Kind.CONTINUED and before is not None:
                size, written = before.stat().st_size, record.head["bytes"]
                if size != written:
                    yield damage(before, size, f"it has {size} bytes of {written} that were written", is_gap=True)
            yield record
        before = path


def folder_bytes(folder: Path) -> int:
    """Return the number of bytes that ``read_folder`` passes over."""
    return sum(path.lstat().st_size for path in segment_files(folder))
