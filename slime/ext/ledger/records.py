"""Accumulates the journal's records into a state.

``ReplayState`` reads only heads.  One subtle rule: a rollout that is generated again (BEGIN) voids the earlier records
of it and of later rollouts, because they belong to a history that the crash ended; a replayed rollout does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from slime.ext.ledger.frames import Kind, Record, segment_number

SAMPLE_FLAGS = "hard"
BATCH_FLAGS = "soft"
"""On-disk names of the two parts of a config fingerprint: flags that affect a sample, and flags that affect which
groups are in a rollout."""


class RecordedEntry(NamedTuple):
    """The position of one execution in one record."""

    record: Record
    position: int


@dataclass(slots=True)
class GroupState:
    """The state of a group after some record."""

    indices: list[int]
    rollout_id: int
    """The rollout of its latest record."""
    process: int
    prompt: str = ""
    """The start of its prompt."""
    segment: int = 0
    """The segment of its ISSUED record; all records of its samples are at or after it."""
    entries: dict[int, tuple[RecordedEntry, ...]] = field(default_factory=dict)
    """``Sample.index`` of an execution -> the records of its fields, in order."""
    generated: frozenset[int] = frozenset()
    """Executions whose last record is an engine's answer, without sample hooks and reward."""

    def copy(self) -> GroupState:
        return replace(self, entries=dict(self.entries))


class HandedGroup(NamedTuple):
    """A group in a rollout's train data; unnumbered groups have only a record."""

    name: int | None
    state: GroupState | None
    record: Record


@dataclass(slots=True)
class SourceCall:
    """One call to the data source."""

    wanted: int | None
    """Number of groups requested; None if groups were returned to the source."""
    names: list[int | None]
    states: list[GroupState | None] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)


@dataclass(slots=True)
class RolloutState:
    """One rollout in the valid history."""

    rollout_id: int
    segment: int
    calls: list[SourceCall] = field(default_factory=list)
    handed: list[HandedGroup] = field(default_factory=list)
    batch: Record | None = None
    """Set once the train data is complete."""
    filtered: dict[int, str] = field(default_factory=dict)
    """Group -> the filter's reason."""
    discarded: set[int] = field(default_factory=set)
    is_trained: bool = False
    is_replayable: bool = True

    @property
    def ended(self) -> set[int]:
        """Groups that do not continue after this rollout."""
        handed = {handed.name for handed in self.handed if handed.name is not None}
        return handed | set(self.filtered) | self.discarded


class ReplayState:
    """The state after all records so far: each rollout's groups, and each group's progress.

    Invariant: ``rollouts`` holds a single history: no two entries were generated from the same data position.
    """

    def __init__(self, fingerprint: Mapping[str, Any] | None = None) -> None:
        """Start empty.

        Args:
            fingerprint: use only records of processes with these sample flags; None uses all.
        """
        self.rollouts: dict[int, RolloutState] = {}
        self.groups: dict[int, GroupState] = {}
        self.num_processes = 0
        self.published: dict[int, int] = {}
        """Rollout of a checkpoint -> the first segment that it needs."""
        self.other_flags: dict[str, Any] = {}
        """Sample flags of a process whose records are not used."""
        self.damage = ""
        """Where and why reading ended early; empty if it did not."""
        self._fingerprint = fingerprint
        self._counts = True
        self._is_replayable = True

    def read(self, records: Iterable[Record]) -> ReplayState:
        for record in records:
            self.add(record)
        return self

    def add(self, record: Record) -> None:
        kind, head = record.kind, record.head
        if kind in (Kind.LIFE, Kind.CONTINUED):  # the first record read of a process may be either
            self.num_processes += kind is Kind.LIFE
            self._compare_flags(head)
        elif kind is Kind.DAMAGED:
            self.damage = head["what"]
        elif kind is Kind.PUBLISHED:
            self.published[head["rollout"]] = head["first"]
        elif self._counts and kind in _HANDLERS:
            _HANDLERS[kind](self, record)

    def _compare_flags(self, head: Mapping[str, Any]) -> None:
        if self._fingerprint is None or "facts" not in head:
            return
        theirs = head["facts"]
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
        """Return the record's rollout, creating one that cannot be replayed if its BEGIN was not read."""
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

    def _trained(self, record: Record) -> None:
        if record.head["rollout"] in self.rollouts:
            self.rollouts[record.head["rollout"]].is_trained = True

    def forget_ended(self, rollout: RolloutState) -> None:
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
    Kind.TRAINED: ReplayState._trained,
}
