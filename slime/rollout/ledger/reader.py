"""Reading a ledger folder: records in the order of writing, heads only, torn tails tolerated."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from slime.rollout.ledger.records import HEADER, STRIPPED, Header, Record

logger = logging.getLogger(__name__)

_SEGMENT = re.compile(r"(?:segment|index)-(\d{8})\.led")


def segment_path(folder: Path, number: int) -> Path:
    """The file of segment ``number``."""
    return folder / f"segment-{number:08d}.led"


def index_path(folder: Path, number: int) -> Path:
    """What compaction keeps of all segments up to ``number`` that no earlier index covers."""
    return folder / f"index-{number:08d}.led"


def segment_number(path: Path) -> int:
    """The number in the name of a segment or an index."""
    match = _SEGMENT.fullmatch(path.name)
    assert match is not None, path
    return int(match.group(1))


def segment_files(folder: Path) -> list[Path]:
    """Indexes, then the segments that none of them covers, each in order."""
    indexes = sorted(folder.glob("index-????????.led"))
    covered = segment_number(indexes[-1]) if indexes else -1
    segments = sorted(path for path in folder.glob("segment-????????.led") if segment_number(path) > covered)
    return indexes + segments


def next_number(folder: Path) -> int:
    """A segment number that was never used in ``folder``."""
    files = [*folder.glob("index-????????.led"), *folder.glob("segment-????????.led")]
    return max((segment_number(path) for path in files), default=-1) + 1


def read_segment(path: Path, *, progress: Callable[[int], None] | None = None) -> Iterator[Record]:
    """The records of one file, up to its end or the first frame that is not whole.

    Args:
        progress: called with the bytes passed since its last call.
    """
    size = path.stat().st_size
    with open(path, "rb", buffering=1 << 16) as file:
        offset = 0
        while offset < size:
            header = Header.parse(file.read(HEADER.size))
            head = None if header is None else header.decode_head(file.read(header.head_bytes))
            if header is None or head is None:
                break
            blob_offset = offset + HEADER.size + header.head_bytes
            end = blob_offset + header.blob_bytes
            if end > size:
                break
            yield Record(
                kind=header.kind,
                head=head,
                segment=path,
                blob_offset=blob_offset,
                blob_bytes=header.blob_bytes,
                blob_crc=header.blob_crc,
                is_stripped=bool(header.flags & STRIPPED),
            )
            if progress is not None:
                progress(end - offset)
            file.seek(end)
            offset = end
        if offset < size:
            logger.info("%s: the last %d bytes are an unfinished record and are not read.", path, size - offset)
            if progress is not None:
                progress(size - offset)


def read_folder(
    folder: Path, *, first_segment: int = 0, progress: Callable[[int], None] | None = None
) -> Iterator[Record]:
    """The records of a ledger from segment ``first_segment`` on; of what was compacted, what its index kept."""
    for path in segment_files(folder):
        if segment_number(path) >= first_segment:
            yield from read_segment(path, progress=progress)


def folder_bytes(folder: Path) -> int:
    """Bytes that ``read_folder`` passes over."""
    return sum(path.stat().st_size for path in segment_files(folder))
