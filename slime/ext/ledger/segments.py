"""Segment files: appended by a thread, and deleted once a checkpoint has made them obsolete.

Callers put items into a queue, which takes well below a microsecond; the thread collects what arrives within the flush
interval, encodes it as frames and writes them with one system call.  Written records survive the death of every
process; ``flush(sync=True)`` makes them survive a machine failure too.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from slime.ext.ledger.frames import Kind, next_number, pack_frame, segment_files, segment_number, segment_path
from slime.utils.errors import DataError

logger = logging.getLogger(__name__)

MAX_WAITING = 16384
"""Queue length beyond which the caller of ``put`` writes the items itself."""
CHUNK_BYTES = 1 << 18
POLITE_ITEMS = 8
"""Records that the thread encodes before it yields the interpreter, about half a millisecond."""
RETRY_INTERVAL_S = 1.0


class JournalWriter:
    """A queue in front of segment files.

    Invariant: records reach the files in the order of ``put``; every file except the current one is complete.
    After writing has failed permanently, every call raises DataError.
    """

    def __init__(
        self,
        folder: Path,
        encode: Callable[[Any], bytes],
        *,
        flush_s: float,
        timeout_s: float,
        process: Mapping[str, Any] | None = None,
        is_threaded: bool = True,
    ) -> None:
        """Open a new segment.

        Args:
            folder: the ledger's folder; created if missing.
            encode: item -> frames; called under the writer's lock, one item at a time, in order.
            flush_s: seconds that an item may wait in memory.
            timeout_s: seconds that writing may fail or block before the journal fails.
            process: facts about this process, stored in the head of every further segment.
            is_threaded: False leaves all writing to ``flush``.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._encode = encode
        self._flush_s = flush_s
        self._timeout_s = timeout_s
        self._process = dict(process or {})
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
        """Queue one item; does nothing after ``close``."""
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
        """Write everything queued so far; with ``sync``, wait until it is on disk."""
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
        """Write everything queued and continue in a new segment; return its number."""
        self.flush()
        with self._lock:
            if not self._is_empty:
                self._try_until_deadline(self._next_segment)
            if self._failure is not None:
                raise self._failure
            return self.number

    def close(self) -> None:
        self._is_closed = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(self._timeout_s)
        self.flush(sync=True)
        os.close(self._file)

    def _next_segment(self) -> None:
        os.fsync(self._file)
        file = self._open(self.number + 1)
        os.close(self._file)  # only now, because its descriptor could be reused for another file
        head = {"t": time.time(), "r": -1, "bytes": self._size, **self._process}
        self.number, self._file, self._size, self._is_empty = self.number + 1, file, 0, True
        self._write(pack_frame(Kind.CONTINUED, head))
        self._is_empty = True

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

    def _take_chunk(self, is_polite: bool) -> bytes:
        frames: list[bytes] = []
        size = 0
        while self._waiting and size < CHUNK_BYTES:
            item = self._waiting.popleft()
            try:
                frame = self._encode(item)
            except Exception:  # samples contain user objects, whose errors must not end the run
                logger.exception("The ledger could not encode a record and continues without it.")
                continue
            frames.append(frame)
            size += len(frame)
            if is_polite and len(frames) % POLITE_ITEMS == 0:
                time.sleep(0)  # yields the interpreter to the event loop
        return b"".join(frames)

    def _write(self, data: bytes) -> None:
        def append() -> None:
            view = memoryview(data)
            while view:
                view = view[os.write(self._file, view) :]
            self._size += len(data)
            self._is_empty = False

        self._try_until_deadline(append)

    def _try_until_deadline(self, change: Callable[[], None]) -> None:
        """Change the files; on failure, truncate a partial record and retry until the deadline fails the journal."""
        deadline_s = time.monotonic() + self._timeout_s
        while self._failure is None:
            try:
                change()
                return
            except OSError as error:
                try:
                    os.ftruncate(self._file, self._size)
                    os.lseek(self._file, self._size, os.SEEK_SET)
                except OSError as worse:  # a partial record remains; nothing may follow it
                    self._failed(worse)
                    return
                if time.monotonic() > deadline_s:
                    self._failed(error)
                    return
                logger.warning("The ledger cannot be written to %s (%s); retrying.", self.folder, error)
                time.sleep(min(RETRY_INTERVAL_S, self._timeout_s))

    def _failed(self, error: OSError) -> DataError:
        tried = f"The ledger in {self.folder} cannot be written (tried for {self._timeout_s:.0f} s): {error}."
        self._failure = DataError(f"{tried} {_REMEDY}")
        logger.error("%s", self._failure)
        return self._failure


_REMEDY = (
    "Free space there, choose another folder with --rollout-ledger-dir, allow more time with "
    "--rollout-ledger-timeout-s, or pass --no-rollout-ledger."
)


def retire(folder: Path, *, first_needed: int) -> int:
    """Delete every segment below ``first_needed``; return the bytes freed."""
    freed = 0
    for path in segment_files(folder):
        if segment_number(path) < first_needed:
            freed += path.stat().st_size
            path.unlink()
    return freed
