"""Compaction: segments that a checkpoint made final become an index.

The index holds the heads of their records, without blobs (and without the answers of single executions, once the whole
group is described).  It is renamed into place before the segments go, and readers skip segments that an index covers:
a kill in between loses and doubles nothing.

A damaged segment is never unlinked: what cannot be read now may be all that tells of a group.  The index says where it
is damaged, so that a check of the ledger goes on to fail.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from slime.rollout.ledger.frames import (
    STRIPPED,
    Kind,
    Record,
    describe_damage,
    pack_frame,
    read_segment,
    segment_number,
)
from slime.rollout.ledger.segments import index_path, read_folder
from slime.utils.atomic_file import replace_file

logger = logging.getLogger(__name__)


def compact(folder: Path, *, first_needed: int) -> int:
    """Fold every segment below ``first_needed`` into an index; return the number of bytes freed."""
    indexes = sorted(folder.glob("index-????????.led"))
    covered = segment_number(indexes[-1]) if indexes else -1
    segments = sorted(folder.glob("segment-????????.led"))
    # A kill before they went, or they are damaged.
    left = [path for path in segments if segment_number(path) <= covered]
    old = [path for path in segments if covered < segment_number(path) < first_needed]
    damaged = {record.head["file"] for path in indexes if left for record in _damage_in(read_segment(path))}
    if old:
        damaged |= _write_index(folder, old)
    freed = 0
    for path in left + old:
        if path.name not in damaged:
            freed += path.stat().st_size
            path.unlink()
    return freed


def _damage_in(records: Iterable[Record]) -> Iterator[Record]:
    return (record for record in records if record.kind is Kind.DAMAGED)


def _write_index(folder: Path, segments: list[Path]) -> set[str]:
    """Write the index of these segments; return the names of those that are damaged."""
    path = index_path(folder, segment_number(segments[-1]))
    described = {
        record.head["g"]
        for record in _read(folder, segments)
        if record.kind in (Kind.FINISHED, Kind.RETURNED, Kind.HANDED)
    }
    damaged = set()

    def write(file: IO[bytes]) -> None:
        for record in _read(folder, segments, verify_blobs=True):
            file.write(_stripped(record, described))
            if record.kind is Kind.DAMAGED:
                damaged.add(record.head["file"])
                logger.error(
                    "The ledger is damaged, %s. The file is kept; see tools/ledger.py %s --check.",
                    describe_damage(record),
                    folder,
                )
        file.write(pack_frame(Kind.WHOLE, {}))

    replace_file(path, write)
    return damaged


def _read(folder: Path, segments: list[Path], *, verify_blobs: bool = False) -> Iterator[Record]:
    """Yield the records of these segments; the beginning of the next one tells whether the last is cut short."""
    for record in read_folder(folder, first_segment=segment_number(segments[0]), verify_blobs=verify_blobs):
        if segment_number(record.segment) > segment_number(segments[-1]):
            return
        yield record


def _stripped(record: Record, described: set[int | None]) -> bytes:
    """Return the frame of a record in the index; empty when other records say the same."""
    if record.kind is Kind.RESPONSE and record.head["g"] in described and not _is_partial(record):
        return b""
    head = dict(record.head)
    if "entries" in head:
        head["entries"] = [stripped_entry(entry) for entry in head["entries"]]
    return pack_frame(record.kind, head, flags=STRIPPED)


def _is_partial(record: Record) -> bool:
    return any(leaf["status"] == "aborted" for entry in record.head["entries"] for leaf in entry["leaves"])


def stripped_entry(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the description of an execution without the parts that need its blob."""
    leaves = [{k: v for k, v in leaf.items() if k not in ("packed", "rest")} for leaf in entry["leaves"]]
    return {"shape": entry["shape"], "leaves": leaves}
