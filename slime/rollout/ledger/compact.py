"""Dropping what a published checkpoint made final: the samples go, a line for each event stays.

Segments below the one that the checkpoint needs are folded into one index file, which holds their heads without blobs
(and without the answers of single executions, once the whole group is described).  The index is renamed into place
before the segments go, and readers skip segments that an index covers: a kill in between loses and doubles nothing.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

from slime.rollout.ledger.reader import index_path, read_segment, segment_number
from slime.rollout.ledger.records import STRIPPED, Kind, Record, pack_frame
from slime.rollout.ledger.unpacking import stripped_entry

logger = logging.getLogger(__name__)


def compact(folder: Path, *, first_needed: int) -> int:
    """Fold every segment below ``first_needed`` into an index; gives the bytes that became free."""
    indexes = sorted(folder.glob("index-????????.led"))
    covered = segment_number(indexes[-1]) if indexes else -1
    segments = sorted(folder.glob("segment-????????.led"))
    old = [path for path in segments if covered < segment_number(path) < first_needed]
    if old:
        _write_index(folder, old)
        covered = segment_number(old[-1])
    freed = 0
    for path in segments:
        if segment_number(path) <= covered:
            freed += path.stat().st_size
            path.unlink()
    return freed


def _write_index(folder: Path, segments: list[Path]) -> None:
    path = index_path(folder, segment_number(segments[-1]))
    unfinished = path.with_suffix(".tmp")
    described = {
        record.head["g"]
        for segment in segments
        for record in read_segment(segment)
        if record.kind in (Kind.FINISHED, Kind.RETURNED, Kind.HANDED)
    }
    with open(unfinished, "wb", buffering=1 << 20) as file:
        for frame in _stripped(segments, described):
            file.write(frame)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _stripped(segments: list[Path], described: set[int | None]) -> Iterator[bytes]:
    for segment in segments:
        for record in read_segment(segment):
            if record.kind is Kind.RESPONSE and record.head["g"] in described and not _is_partial(record):
                continue
            head = dict(record.head)
            if "entries" in head:
                head["entries"] = [stripped_entry(entry) for entry in head["entries"]]
            yield pack_frame(record.kind, head, flags=STRIPPED)


def _is_partial(record: Record) -> bool:
    return any(leaf["status"] == "aborted" for entry in record.head["entries"] for leaf in entry["leaves"])
