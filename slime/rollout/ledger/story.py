"""What the records add up to: for each rollout, where the groups issued in it went; for each group, how far it is.

``Story`` reads heads only.  The one subtle rule: a rollout that is generated again (BEGIN) makes void what was noted
of it and of later rollouts, because what came after a crash is another line of events; a rollout that was replayed
does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from slime.rollout.ledger.reader import segment_number
from slime.rollout.ledger.records import Kind, Record

HARD = "hard"
SOFT = "soft"
"""Groups of ``facts``: flags that decide what a sample is, and flags that decide which groups are in a rollout."""


class Part(NamedTuple):
    """One execution in one record."""

    record: Record
    position: int


@dataclass(slots=True)
class GroupState:
    """What the ledger knows of a group after some record."""

    indices: list[int]
    rollout_id: int
    """The rollout in which the last of it was noted."""
    life: int
    prompt: str = ""
    """How it begins."""
    segment: int = 0
    """The one that says it was issued: its parts are told from there."""
    parts: dict[int, tuple[Part, ...]] = field(default_factory=dict)
    """``Sample.index`` of an execution -> the records that tell its fields, in order."""
    generated: frozenset[int] = frozenset()
    """Executions whose last record is an engine's answer: sample hooks and reward are still to come."""

    def copy(self) -> GroupState:
        """The state now; later records do not change it."""
        return replace(self, parts=dict(self.parts))

    @property
    def first_segment(self) -> int:
        """The oldest segment without which its parts cannot be told: no part is older than its issue."""
        return self.segment


@dataclass(slots=True)
class Handed:
    """A group in a rollout's train data: numbered, or known only by its record."""

    name: int | None
    state: GroupState | None
    record: Record


@dataclass(slots=True)
class Source:
    """One call of the data source."""

    wanted: int | None
    """Groups asked for; None: groups were given back."""
    names: list[int | None]
    states: list[GroupState | None] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)


@dataclass(slots=True)
class RolloutStory:
    """One rollout in the line of events that counts."""

    rollout_id: int
    segment: int
    life: int
    calls: list[Source] = field(default_factory=list)
    handed: list[Handed] = field(default_factory=list)
    batch: Record | None = None
    """Set once the train data is complete."""
    filtered: dict[int, str] = field(default_factory=dict)
    discarded: set[int] = field(default_factory=set)
    times_replayed: int = 0
    is_trained: bool = False
    is_replayable: bool = True

    @property
    def ended(self) -> set[int]:
        """Groups that do not go on after it."""
        handed = {handed.name for handed in self.handed if handed.name is not None}
        return handed | set(self.filtered) | self.discarded


class Story:
    """The sum of all records so far.

    Invariant: ``rollouts`` holds one line of events: no two entries were generated from the same state of the data.
    """

    def __init__(self, facts: Mapping[str, Any] | None = None) -> None:
        """Start empty.

        Args:
            facts: count only what processes with these facts noted; None counts everything.
        """
        self.rollouts: dict[int, RolloutStory] = {}
        self.groups: dict[int, GroupState] = {}
        self.life = 0
        self.starts: list[tuple[int, int, int]] = []
        """For each process: its first segment, the rollout it began with, the segment it recovered from."""
        self.published: dict[int, int] = {}
        """Checkpoint -> the first segment that it needs."""
        self.other_facts: dict[str, Any] = {}
        self._facts = facts
        self._counts = True

    def read(self, records: Iterable[Record]) -> Story:
        """Take in records; gives self."""
        for record in records:
            self.add(record)
        return self

    def add(self, record: Record) -> None:
        """Take in one record."""
        kind, head = record.kind, record.head
        if kind is Kind.LIFE:
            self._start_life(record)
        elif kind is Kind.PUBLISHED:
            self.published[head["rollout"]] = head["first"]
        elif self._counts:
            _HANDLERS.get(kind, Story._ignore)(self, record)

    def _start_life(self, record: Record) -> None:
        head = record.head
        self.life += 1
        self.starts.append((segment_number(record.segment), head["start"], head["first"]))
        if self._facts is None:
            return
        self._counts = head["facts"][HARD] == self._facts[HARD]
        if not self._counts:
            self.other_facts = head["facts"][HARD]
        self._is_replayable = head["facts"][SOFT] == self._facts[SOFT]

    _is_replayable = True

    def _ignore(self, record: Record) -> None:
        """A record that changes nothing here."""

    def _begin(self, record: Record) -> None:
        rollout_id = record.head["r"]
        for void in [known for known in self.rollouts if known >= rollout_id]:
            del self.rollouts[void]
        self.rollouts[rollout_id] = RolloutStory(
            rollout_id, segment_number(record.segment), self.life, is_replayable=self._is_replayable
        )

    def _now(self, record: Record) -> RolloutStory:
        """The rollout in progress; made up when its beginning is not among the records."""
        rollout_id = record.head["r"]
        if rollout_id not in self.rollouts:
            self.rollouts[rollout_id] = RolloutStory(
                rollout_id, segment_number(record.segment), self.life, is_replayable=False
            )
        return self.rollouts[rollout_id]

    def _issued(self, record: Record) -> None:
        head = record.head
        now = self._now(record)
        names = [described and described[0] for described in head["groups"]]
        now.calls.append(Source(head["wanted"], names))
        if None in names:
            now.is_replayable = False
        for described in head["groups"]:
            if described is None:
                continue
            name, indices, prompt, is_recovered = described
            state = self.groups.get(name)
            if state is None or state.indices != indices or (state.life != self.life and not is_recovered):
                self.groups[name] = GroupState(
                    indices, head["r"], self.life, prompt, segment=segment_number(record.segment)
                )
            else:
                state.life = self.life

    def _take_parts(self, record: Record) -> GroupState | None:
        head = record.head
        state = self.groups.get(head["g"])
        if state is None or head["i"] is None:
            return None
        for position, index in enumerate(head["i"]):
            state.parts[index] = (*state.parts.get(index, ()), Part(record, position))
        indices = frozenset(head["i"])
        is_answer = record.kind is Kind.RESPONSE
        state.generated = state.generated | indices if is_answer else state.generated - indices
        state.rollout_id = head["r"]
        return state

    def _returned(self, record: Record) -> None:
        state = self._take_parts(record)
        call = Source(None, [record.head["g"]], [state and state.copy()], [record])
        self._now(record).calls.append(call)

    def _handed(self, record: Record) -> None:
        now = self._now(record)
        if now.batch is not None:
            return
        state = self._take_parts(record)
        now.handed.append(Handed(record.head["g"], state and state.copy(), record))

    def _batch(self, record: Record) -> None:
        now = self.rollouts.get(record.head["rollout"])
        if now is None:
            return
        now.batch = record
        if len(now.handed) != record.head["num_groups"]:
            now.is_replayable = False

    def _filtered(self, record: Record) -> None:
        self._now(record).filtered[record.head["g"]] = record.head["reason"]

    def _discarded(self, record: Record) -> None:
        self._now(record).discarded.update(record.head["groups"])

    def _replayed(self, record: Record) -> None:
        if record.head["rollout"] in self.rollouts:
            self.rollouts[record.head["rollout"]].times_replayed += 1

    def _trained(self, record: Record) -> None:
        if record.head["rollout"] in self.rollouts:
            self.rollouts[record.head["rollout"]].is_trained = True

    def drop_gone(self, rollout: RolloutStory) -> None:
        """Forget groups that a rollout was the end of."""
        for name in rollout.ended:
            self.groups.pop(name, None)


_HANDLERS = {
    Kind.BEGIN: Story._begin,
    Kind.ISSUED: Story._issued,
    Kind.RESPONSE: Story._take_parts,
    Kind.FINISHED: Story._take_parts,
    Kind.FILTERED: Story._filtered,
    Kind.RETURNED: Story._returned,
    Kind.HANDED: Story._handed,
    Kind.BATCH: Story._batch,
    Kind.DISCARDED: Story._discarded,
    Kind.REPLAYED: Story._replayed,
    Kind.TRAINED: Story._trained,
}
