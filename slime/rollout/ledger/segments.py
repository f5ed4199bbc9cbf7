"""Segment files: appended by a thread, read in order, folded into an index once a checkpoint makes them final.

Callers put items into a queue, which costs them well below a microsecond; the thread gathers what arrives within the
flush interval, turns it into frames and writes them with one system call.  Written records survive the death of every
process; ``flush(sync=True)`` makes them survive the machine's, too.

Compaction folds the segments below the one that the checkpoint needs into one index file, which holds their heads
without blobs (and without the answers of single executions, once the whole group is described).  The index is renamed
into place before the segments go, and readers skip segments that an index covers: a kill in between loses and doubles
nothing.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from slime.rollout.ledger.records import HEADER, STRIPPED, Header, Kind, Record, pack_frame, segment_number
from slime.utils.errors import DataError

logger = logging.getLogger(__name__)


def segment_path(folder: Path, number: int) -> Path:
    """Return the file of segment ``number``."""
    return folder / f"segment-{number:08d}.led"


def index_path(folder: Path, number: int) -> Path:
    """Return the file that keeps the heads of all segments up to ``number`` that no earlier index covers."""
    return folder / f"index-{number:08d}.led"


def segment_files(folder: Path) -> list[Path]:
    """Return the indexes, then the segments that none of them covers, each in order."""
    indexes = sorted(folder.glob("index-????????.led"))
    covered = segment_number(indexes[-1]) if indexes else -1
    segments = sorted(path for path in folder.glob("segment-????????.led") if segment_number(path) > covered)
    return indexes + segments


def next_number(folder: Path) -> int:
    """Return a segment number that was never used in ``folder``."""
    files = [*folder.glob("index-????????.led"), *folder.glob("segment-????????.led")]
    return max((segment_number(path) for path in files), default=-1) + 1


def read_segment(path: Path, *, progress: Callable[[int], None] | None = None) -> Iterator[Record]:
    """Yield the records of one file, up to its end or the first frame that is not whole.

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
    """Yield the records from segment ``first_segment`` on; of compacted segments, the heads in their index."""
    for path in segment_files(folder):
        if segment_number(path) >= first_segment:
            yield from read_segment(path, progress=progress)


def folder_bytes(folder: Path) -> int:
    """Return the number of bytes that ``read_folder`` passes over."""
    return sum(path.stat().st_size for path in segment_files(folder))


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
            if self._size:
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
            self.number += 1
            self._size = 0
            self._file = file
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
                self.bytes_written += len(data)
                return
            except OSError as error:
                self._wait_or_fail(error, deadline_s, cut_back=True)

    def _wait_or_fail(self, error: OSError, deadline_s: float, *, cut_back: bool = False) -> None:
        """Sleep before the next try after a failed write or open; set ``_failure`` once the time is up.

        Args:
            cut_back: drop what a failed write left behind the last whole record.
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


def stripped_entry(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the description of an execution without the parts that need its blob."""
    leaves = [{k: v for k, v in leaf.items() if k not in ("packed", "rest")} for leaf in entry["leaves"]]
    return {"shape": entry["shape"], "leaves": leaves}
