"""Segment files: appended by a thread, and compacted once a checkpoint has made them final.

Callers put items into a queue, which costs them well below a microsecond; the thread gathers what arrives within the
flush interval, turns it into frames and writes them with one system call.  Written records survive the death of every
process; ``flush(sync=True)`` makes them survive the machine's, too.

Compaction folds old segments into an index: the heads of their records, without blobs (and without the answers of
single executions, once the whole group is described).  It is renamed into place before the segments go, and readers
skip segments that an index covers: a kill in between loses and doubles nothing.  A damaged segment is never unlinked:
what cannot be read now may be all that tells of a group.  The index says where it is damaged, so that a check of the
ledger goes on to fail.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from slime.ext.ledger.frames import (
    STRIPPED,
    Kind,
    Record,
    describe_damage,
    index_path,
    next_number,
    pack_frame,
    read_folder,
    read_segment,
    segment_number,
    segment_path,
)
from slime.utils.atomic_file import replace_file
from slime.utils.errors import DataError

logger = logging.getLogger(__name__)

MAX_WAITING = 16384
"""Items in the queue beyond which the caller of ``put`` writes them itself."""
CHUNK_BYTES = 1 << 18
POLITE_ITEMS = 8
"""Records made in a row by the thread, about half a millisecond."""
SEGMENT_BYTES = 256 << 20
RETRY_INTERVAL_S = 1.0


class JournalWriter:
    """A queue in front of segment files.

    Invariant: records reach the files in the order of ``put``; every file but the one being written is complete.
    """

    def __init__(
        self,
        folder: Path,
        encode: Callable[[Any], bytes],
        *,
        flush_s: float,
        timeout_s: float,
        segment_bytes: int = SEGMENT_BYTES,
        is_threaded: bool = True,
    ) -> None:
        """Open a segment that was never used.

        Args:
            folder: of the ledger; made when it is missing.
            encode: item -> frames; runs under the writer's lock, one item at a time, in order.
            flush_s: how long an item may wait in memory.
            timeout_s: how long writing may fail or block before the journal fails.
            segment_bytes: size at which the next segment is begun.
            is_threaded: False leaves all writing to ``flush``.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.bytes_written = 0
        self.items_written = 0
        self._encode = encode
        self._flush_s = flush_s
        self._timeout_s = timeout_s
        self._segment_bytes = segment_bytes
        self._waiting: deque[Any] = deque()
        self._lock = threading.RLock()
        self._wake = threading.Event()
        self._failure: DataError | None = None
        self._is_closed = False
        self.number = next_number(folder)
        self._file = self._open(self.number)
        self._size = 0
        self._is_empty = True
        self._thread: threading.Thread | None = None
        if is_threaded:
            self._thread = threading.Thread(target=self._serve, name="slime-ledger", daemon=True)
            self._thread.start()

    def _open(self, number: int) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        return os.open(segment_path(self.folder, number), flags, 0o644)

    def put(self, item: Any) -> None:
        """Queue one item; after ``close`` do nothing.

        Raises:
            DataError: an earlier write failed for good.
        """
        if self._failure is not None:
            raise self._failure
        if self._is_closed:
            return
        self._waiting.append(item)
        if not self._wake.is_set():
            self._wake.set()
        if len(self._waiting) > MAX_WAITING:
            self.flush()

    def flush(self, *, sync: bool = False) -> None:
        """Write everything queued so far; with ``sync`` down to the disk.

        Raises:
            DataError: it could not be done within the deadline, or the disk did not keep it.
        """
        if not self._lock.acquire(timeout=2 * self._timeout_s):
            raise DataError(f"The ledger {self.folder} is still writing after {2 * self._timeout_s:.0f} s. {_REMEDY}")
        try:
            self._drain()
            if self._failure is not None:
                raise self._failure
            if sync:
                try:
                    os.fsync(self._file)
                except OSError as error:
                    raise self._failed(error) from error
        finally:
            self._lock.release()

    def rotate(self) -> int:
        """Write everything queued and go on in a new segment; return its number.

        Raises:
            DataError: as ``flush`` does, or the segment could not be begun.
        """
        self.flush()
        with self._lock:
            if not self._is_empty:
                self._next_segment()
            if self._failure is not None:
                raise self._failure
            return self.number

    def close(self) -> None:
        """Write what is queued and end the thread."""
        self._is_closed = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(self._timeout_s)
        self.flush(sync=True)
        os.close(self._file)

    def _next_segment(self) -> None:
        """Go on in a new file.  The old one stays open until then, or its descriptor could be reused for another."""
        deadline_s = time.monotonic() + self._timeout_s
        while self._failure is None:
            try:
                os.fsync(self._file)
                file = self._open(self.number + 1)
            except OSError as error:
                self._wait_or_fail(error, deadline_s)
                continue
            os.close(self._file)
            head = {"t": time.time(), "r": -1, "previous": self.number, "bytes": self._size}
            self.number += 1
            self._size = 0
            self._file = file
            self._write(pack_frame(Kind.CONTINUED, head))
            self._is_empty = True
            return

    def _serve(self) -> None:
        while not self._is_closed:
            self._wake.wait()
            time.sleep(self._flush_s)
            self._wake.clear()
            with self._lock:
                self._drain(is_polite=True)
            if self._failure is not None:
                return

    def _drain(self, *, is_polite: bool = False) -> None:
        while self._waiting and self._failure is None:
            data = self._take_chunk(is_polite)
            if data:
                self._write(data)
            if self._size > self._segment_bytes:
                self._next_segment()

    def _take_chunk(self, is_polite: bool) -> bytes:
        """Return the frames of queued items, up to about ``CHUNK_BYTES``."""
        frames: list[bytes] = []
        size = 0
        while self._waiting and size < CHUNK_BYTES:
            item = self._waiting.popleft()
            try:
                frame = self._encode(item)
            except Exception:  # The objects of a sample are the user's; whatever they raise must not end the run.
                logger.exception("The ledger could not encode a record and continues without it.")
                continue
            frames.append(frame)
            size += len(frame)
            self.items_written += 1
            if is_polite and self.items_written % POLITE_ITEMS == 0:
                time.sleep(0)  # Lets the event loop have the interpreter.
        return b"".join(frames)

    def _write(self, data: bytes) -> None:
        """Append ``data`` whole; on an error cut the file back and try again until the deadline."""
        deadline_s = time.monotonic() + self._timeout_s
        while self._failure is None:
            try:
                view = memoryview(data)
                while view:
                    view = view[os.write(self._file, view) :]
                self._size += len(data)
                self._is_empty = False
                self.bytes_written += len(data)
                return
            except OSError as error:
                self._wait_or_fail(error, deadline_s, cut_back=True)

    def _wait_or_fail(self, error: OSError, deadline_s: float, *, cut_back: bool = False) -> None:
        """Sleep before the next try after a failed write or open; set ``_failure`` once the time is up.

        Args:
            cut_back: drop what a failed write left after the last whole record.
        """
        try:
            if cut_back:
                os.ftruncate(self._file, self._size)
                os.lseek(self._file, self._size, os.SEEK_SET)
        except OSError as worse:  # half a record stays; nothing may follow it
            self._failed(worse)
            return
        if time.monotonic() > deadline_s:
            self._failed(error)
            return
        logger.warning("The ledger cannot be written to %s (%s); retrying.", self.folder, error)
        time.sleep(min(RETRY_INTERVAL_S, self._timeout_s))

    def _failed(self, error: OSError) -> DataError:
        """Set the failure that ends all writing, and return it."""
        tried = f"The ledger in {self.folder} cannot be written (tried for {self._timeout_s:.0f} s): {error}."
        self._failure = DataError(f"{tried} {_REMEDY}")
        logger.error("%s", self._failure)
        return self._failure


_REMEDY = (
    "Make room there, choose another place with --rollout-ledger-dir, allow more time with "
    "--rollout-ledger-timeout-s, or pass --no-rollout-ledger."
)


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
