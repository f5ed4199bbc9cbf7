"""The records of the journal, and the state they add up to.

A record is a frame: a header of 20 bytes, a *head* (msgpack: what happened, small enough to be read by the million)
and a *blob* (tokens, log-probs and everything else a sample holds; readers of events alone seek over it).

    magic u8 | kind u8 | flags u16 | head bytes u32 | blob bytes u32 | crc32 of header and head | crc32 of blob

Frames are only appended.  A process that is killed leaves at most one unfinished frame, at the end of its last
segment; the reader stops there.

``ReplayState`` reads heads only.  The one subtle rule: a rollout that is generated again (BEGIN) voids the records of
it and of later rollouts, because they belong to the line of events that the crash ended; a replayed rollout does not.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from slime.utils.errors import DataError

MAGIC = 0x5C
HEADER = struct.Struct("<BBHIIII")
STRIPPED = 1
"""Flag: compaction dropped the blob; only the head is left."""
MAX_HEAD_BYTES = 1 << 28

SAMPLE_FLAGS = "hard"
BATCH_FLAGS = "soft"
"""The two parts of a config fingerprint: flags that decide a sample, and flags that decide which groups are in a
rollout.  These are their names on disk."""

_SEGMENT = re.compile(r"(?:segment|index)-(\d{8})\.led")


def segment_number(path: Path) -> int:
    """Return the number in the name of a segment or an index."""
    match = _SEGMENT.fullmatch(path.name)
    assert match is not None, path
    return int(match.group(1))


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
    REPLAYED = 11
    """A rollout's train data was taken from the journal, not generated."""
    TRAINED = 12
    """The optimizer took the steps of a rollout."""
    SAVED = 13
    """A checkpoint's data position was written; it begins to count with PUBLISHED."""
    PUBLISHED = 14
    """The tracker names the checkpoint."""


@dataclass(frozen=True, slots=True)
class Record:
    """A record as read from a segment; the blob stays on disk."""

    kind: Kind
    head: dict[str, Any]
    segment: Path
    blob_offset: int
    blob_bytes: int
    blob_crc: int
    is_stripped: bool = False

    def read_blob(self) -> bytes:
        """Read the blob from the file.

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


encode_value = msgspec.msgpack.Encoder().encode
"""Plain value -> msgpack."""
decode_value = msgspec.msgpack.Decoder().decode
"""msgpack -> plain value."""
_decode_head = msgspec.msgpack.Decoder(dict).decode


def pack_frame(kind: Kind, head: Mapping[str, Any], blob: bytes = b"", *, flags: int = 0) -> bytes:
    """Return one frame."""
    body = encode_value(head)
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
        """Return the header; None when ``data`` does not begin a frame."""
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
        """Return the head; None when it is cut off or damaged."""
        start = HEADER.pack(MAGIC, self.kind, self.flags, self.head_bytes, self.blob_bytes, 0, self.blob_crc)
        if len(head) != self.head_bytes or zlib.crc32(head, zlib.crc32(start)) != self.head_crc:
            return None
        return _decode_head(head)


class RecordedEntry(NamedTuple):
    """One execution in one record."""

    record: Record
    position: int


@dataclass(slots=True)
class GroupState:
    """A group as of some record."""

    indices: list[int]
    rollout_id: int
    """The rollout of its latest record."""
    process: int
    prompt: str = ""
    """The beginning of its prompt."""
    segment: int = 0
    """The segment of its ISSUED record; no record that tells its samples is older."""
    entries: dict[int, tuple[RecordedEntry, ...]] = field(default_factory=dict)
    """``Sample.index`` of an execution -> the records that tell its fields, in order."""
    generated: frozenset[int] = frozenset()
    """Executions whose last record is an engine's answer: sample hooks and reward are still to come."""

    def copy(self) -> GroupState:
        """Return the state now; later records do not change it."""
        return replace(self, entries=dict(self.entries))


class HandedGroup(NamedTuple):
    """A group in a rollout's train data: numbered, or known only by its record."""

    name: int | None
    state: GroupState | None
    record: Record


@dataclass(slots=True)
class SourceCall:
    """One call of the data source."""

    wanted: int | None
    """Groups asked for; None: groups were given back."""
    names: list[int | None]
    states: list[GroupState | None] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)


@dataclass(slots=True)
class RolloutState:
    """One rollout in the line of events that counts."""

    rollout_id: int
    segment: int
    calls: list[SourceCall] = field(default_factory=list)
    handed: list[HandedGroup] = field(default_factory=list)
    batch: Record | None = None
    """Set once the train data is complete."""
    filtered: dict[int, str] = field(default_factory=dict)
    """Group -> reason."""
    discarded: set[int] = field(default_factory=set)
    times_replayed: int = 0
    is_trained: bool = False
    is_replayable: bool = True

    @property
    def ended(self) -> set[int]:
        """Groups that do not go on after it."""
        handed = {handed.name for handed in self.handed if handed.name is not None}
        return handed | set(self.filtered) | self.discarded


class ReplayState:
    """The sum of all records so far: for each rollout its groups, for each group how far it has come.

    Invariant: ``rollouts`` holds one line of events: no two entries were generated from the same state of the data.
    """

    def __init__(self, fingerprint: Mapping[str, Any] | None = None) -> None:
        """Start empty.

        Args:
            fingerprint: count only records of processes with these sample flags; None counts every process.
        """
        self.rollouts: dict[int, RolloutState] = {}
        self.groups: dict[int, GroupState] = {}
        self.num_processes = 0
        self.published: dict[int, int] = {}
        """Checkpoint -> the first segment that it needs."""
        self.other_flags: dict[str, Any] = {}
        """Sample flags of a process whose records do not count."""
        self._fingerprint = fingerprint
        self._counts = True
        self._is_replayable = True

    def read(self, records: Iterable[Record]) -> ReplayState:
        """Add records; return self."""
        for record in records:
            self.add(record)
        return self

    def add(self, record: Record) -> None:
        """Add one record."""
        kind, head = record.kind, record.head
        if kind is Kind.LIFE:
            self._start_process(record)
        elif kind is Kind.PUBLISHED:
            self.published[head["rollout"]] = head["first"]
        elif self._counts and kind in _HANDLERS:
            _HANDLERS[kind](self, record)

    def _start_process(self, record: Record) -> None:
        self.num_processes += 1
        if self._fingerprint is None:
            return
        theirs = record.head["facts"]
        self._counts = theirs[SAMPLE_FLAGS] == self._fingerprint[SAMPLE_FLAGS]
        if not self._counts:
            self.other_flags = theirs[SAMPLE_FLAGS]
        self._is_replayable = theirs[BATCH_FLAGS] == self._fingerprint[BATCH_FLAGS]

    def _begin(self, record: Record) -> None:
        rollout_id = record.head["r"]
        for void in [known for known in self.rollouts if known >= rollout_id]:
            del self.rollouts[void]
        self._add_rollout(record, is_replayable=self._is_replayable)

    def _add_rollout(self, record: Record, *, is_replayable: bool) -> RolloutState:
        rollout_id = record.head["r"]
        rollout = RolloutState(rollout_id, segment_number(record.segment), is_replayable=is_replayable)
        self.rollouts[rollout_id] = rollout
        return rollout

    def _current(self, record: Record) -> RolloutState:
        """Return the rollout in progress; an incomplete one when its beginning is not among the records."""
        return self.rollouts.get(record.head["r"]) or self._add_rollout(record, is_replayable=False)

    def _issued(self, record: Record) -> None:
        head = record.head
        rollout = self._current(record)
        names = [described and described[0] for described in head["groups"]]
        rollout.calls.append(SourceCall(head["wanted"], names))
        if None in names:
            rollout.is_replayable = False
        for described in head["groups"]:
            if described is None:
                continue
            name, indices, prompt, is_recovered = described
            state = self.groups.get(name)
            if state is None or state.indices != indices or (state.process != self.num_processes and not is_recovered):
                number = segment_number(record.segment)
                self.groups[name] = GroupState(indices, head["r"], self.num_processes, prompt, segment=number)
            else:
                state.process = self.num_processes

    def _add_entries(self, record: Record) -> GroupState | None:
        head = record.head
        state = self.groups.get(head["g"])
        if state is None or head["i"] is None:
            return None
        for position, index in enumerate(head["i"]):
            state.entries[index] = (*state.entries.get(index, ()), RecordedEntry(record, position))
        indices = frozenset(head["i"])
        is_answer = record.kind is Kind.RESPONSE
        state.generated = state.generated | indices if is_answer else state.generated - indices
        state.rollout_id = head["r"]
        return state

    def _returned(self, record: Record) -> None:
        state = self._add_entries(record)
        call = SourceCall(None, [record.head["g"]], [state and state.copy()], [record])
        self._current(record).calls.append(call)

    def _handed(self, record: Record) -> None:
        rollout = self._current(record)
        if rollout.batch is not None:
            return
        state = self._add_entries(record)
        rollout.handed.append(HandedGroup(record.head["g"], state and state.copy(), record))

    def _batch(self, record: Record) -> None:
        rollout = self.rollouts.get(record.head["rollout"])
        if rollout is None:
            return
        rollout.batch = record
        if len(rollout.handed) != record.head["num_groups"]:
            rollout.is_replayable = False

    def _filtered(self, record: Record) -> None:
        self._current(record).filtered[record.head["g"]] = record.head["reason"]

    def _discarded(self, record: Record) -> None:
        self._current(record).discarded.update(record.head["groups"])

    def _replayed(self, record: Record) -> None:
        if record.head["rollout"] in self.rollouts:
            self.rollouts[record.head["rollout"]].times_replayed += 1

    def _trained(self, record: Record) -> None:
        if record.head["rollout"] in self.rollouts:
            self.rollouts[record.head["rollout"]].is_trained = True

    def forget_ended(self, rollout: RolloutState) -> None:
        """Drop the groups that ended in a rollout."""
        for name in rollout.ended:
            self.groups.pop(name, None)


_HANDLERS = {
    Kind.BEGIN: ReplayState._begin,
    Kind.ISSUED: ReplayState._issued,
    Kind.RESPONSE: ReplayState._add_entries,
    Kind.FINISHED: ReplayState._add_entries,
    Kind.FILTERED: ReplayState._filtered,
    Kind.RETURNED: ReplayState._returned,
    Kind.HANDED: ReplayState._handed,
    Kind.BATCH: ReplayState._batch,
    Kind.DISCARDED: ReplayState._discarded,
    Kind.REPLAYED: ReplayState._replayed,
    Kind.TRAINED: ReplayState._trained,
}
