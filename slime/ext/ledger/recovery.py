"""Recovery from the journal: rollouts to train again, and groups to continue with.

The data source is at the checkpoint's position, and gives the same groups again in the same order.  So nothing is
put into it: when it gives a group of which the journal has samples, they are brought to the recorded state.  A rollout
whose train data was complete is not generated again: its calls of the data source are repeated, and the recorded
samples handed over.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from slime.ext.ledger.frames import Record, read_folder
from slime.ext.ledger.journal import Journal, group_name, prompt_start
from slime.ext.ledger.records import SAMPLE_FLAGS, GroupState, HandedGroup, ReplayState, RolloutState
from slime.ext.ledger.sample_codec import apply_entry, to_entry
from slime.rollout import plain_values
from slime.rollout.base_types import RolloutFnTrainOutput, leaf_samples
from slime.rollout.rm_hub.policy import UNGRADED_STATUS
from slime.utils.errors import DataError
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

NO_SEGMENT = 1 << 60


class SourceRecorder:
    """The recorder of a data source's calls: each group that passes is recorded, or brought to its recorded state.

    It takes the place of the source's two methods; calls inside these are not recorded.
    """

    def __init__(
        self, source: Any, journal: Journal, recover: Callable[[list[Any]], list[Any] | None] = lambda group: None
    ) -> None:
        """Record the calls of ``source`` from now on.

        Args:
            recover: returns the recorded state of a group; None when the journal has none.
        """
        self._get, self._add = source.get_samples, source.add_samples
        self._journal = journal
        self._recover = recover
        self._ahead: deque[list[Any]] = deque()
        self._is_inside = False
        source.get_samples, source.add_samples = self.get_samples, self.add_samples

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """Return the source's next groups, as far as an earlier process had brought them."""
        if self._is_inside:
            return self._get(num_samples)
        num_ahead = len(self._ahead)
        groups = self.take_unrecorded(num_samples)
        recovered = [self._recover(group) for group in groups]
        groups = [known or group for known, group in zip(recovered, groups, strict=True)]
        self._journal.record_issued(num_samples, groups, [known is not None for known in recovered])
        # After that record: the next one tells what differs from it, and so that the error is gone.
        for number, (group, known) in enumerate(zip(groups, recovered, strict=True)):
            if known is not None or number < num_ahead:
                _forget_failed_rewards(group)
        return groups

    def add_samples(self, groups: list[list[Sample]]) -> None:
        is_outer = not self._is_inside
        self.add_unrecorded(groups)
        if is_outer:
            self._journal.record_returned(groups)

    def take_unrecorded(self, num_samples: int) -> list[list[Any]]:
        """Return the groups put ahead, then the source's next ones, without a record."""
        ahead = [self._ahead.popleft() for _ in range(min(num_samples, len(self._ahead)))]
        if len(ahead) == num_samples:
            return ahead
        with self._inside():
            return ahead + self._get(num_samples - len(ahead))

    def add_unrecorded(self, groups: list[list[Any]]) -> None:
        with self._inside():
            self._add(groups)

    @contextmanager
    def _inside(self) -> Iterator[None]:
        before, self._is_inside = self._is_inside, True
        try:
            yield
        finally:
            self._is_inside = before

    def put_ahead(self, groups: list[list[Any]]) -> None:
        """Put groups that the source gave before in front of its next ones."""
        self._ahead.extend(groups)

    @property
    def ahead(self) -> list[list[Any]]:
        """Groups put ahead that were not asked for yet."""
        return list(self._ahead)


def _forget_failed_rewards(group: list[Any]) -> None:
    """Undo what ``--rm-failure-policy`` did to a sample, so that the pool asks the grader again.

    An environment is not asked a second time.
    """
    for sample in leaf_samples(group):
        metadata = sample.metadata or {}
        status = metadata.get(UNGRADED_STATUS, sample.status.value)
        can_be_graded = status != Sample.Status.FAILED.value and "environment_reward" not in metadata
        if "reward_error" in metadata and can_be_graded:
            if UNGRADED_STATUS in metadata:
                sample.status, sample.remove_sample = Sample.Status(status), False
            errors = ("reward_error", UNGRADED_STATUS)
            sample.metadata = {key: value for key, value in metadata.items() if key not in errors}
            sample.reward = None


def _is_same_prompt(group: list[Any], state: GroupState) -> bool:
    """Return whether the group from the data source is the recorded one; the data may have changed."""
    first = next(leaf_samples(group), None)
    return first is not None and len(group) == len(state.indices) and prompt_start(first.prompt) == state.prompt


class Marks(NamedTuple):
    """Recovered samples that the rollout has not asked about yet, by their ``id``."""

    masked: dict[int, Sample]
    """Their mask was set in the very rollout that is in progress."""
    unseen: dict[int, Sample]
    """No sample hook has seen the answer."""


class Recovery:
    """Everything recorded after a checkpoint and not used up yet.

    Invariant: what is left of it is in segments from ``first_segment`` on.
    """

    def __init__(
        self,
        folder: Path,
        *,
        first_segment: int,
        start_rollout_id: int,
        fingerprint: dict[str, Any],
        open_groups: Iterable[list[Any]] = (),
    ) -> None:
        """Read the journal from ``first_segment`` on (heads only; samples are read when they are needed).

        Args:
            open_groups: those that the source had given when the checkpoint was made, and that had not come to an end.
        """
        state = ReplayState(fingerprint).read(read_folder(folder, first_segment=first_segment))
        for rollout in state.rollouts.values():
            if rollout.rollout_id < start_rollout_id:
                state.forget_ended(rollout)
        self._groups = {name: group for name, group in state.groups.items() if group.entries}
        self._rollouts = {k: rollout for k, rollout in state.rollouts.items() if k >= start_rollout_id}
        self._next = start_rollout_id
        self._given: dict[int, list[Any]] = {}
        """Groups that the source gave before, or to replayed rollouts, and that have not come to an end."""
        ended = set().union(*(rollout.ended for k, rollout in state.rollouts.items() if k < start_rollout_id))
        for group in open_groups:
            name = group_name(group)
            if name is not None and name not in ended:  # one may have been filtered right after the position was taken
                self._given[name] = group
        self._blobs: tuple[Record, bytes] | None = None
        if state.damage:
            logger.error(
                "The ledger %s is damaged, %s. What was recorded from there on is generated again; no prompt is lost.",
                folder,
                state.damage,
            )
        if state.other_flags:
            own = fingerprint[SAMPLE_FLAGS]
            changed = [name for name in own if own[name] != state.other_flags.get(name)]
            logger.warning(
                "Samples that an earlier process left in the ledger %s are not used: it ran with another %s.",
                folder,
                ", ".join(changed),
            )

    @property
    def first_segment(self) -> int:
        """Oldest segment that is still needed; ``NO_SEGMENT`` when none is."""
        groups = [state.segment for state in self._groups.values()]
        rollouts = [rollout.segment for rollout in self._rollouts.values() if rollout.batch is not None]
        return min(groups + rollouts, default=NO_SEGMENT)

    @property
    def is_used_up(self) -> bool:
        return self.first_segment == NO_SEGMENT and not self._given

    @property
    def given(self) -> list[list[Any]]:
        """Groups that the source will not give again, and that no rollout of this process has yet."""
        return list(self._given.values())

    def describe(self) -> str:
        complete = [k for k, rollout in sorted(self._rollouts.items()) if rollout.batch is not None]
        handed = {handed.name for k in complete for handed in self._rollouts[k].handed}
        open_groups = [name for name in self._groups if name not in handed]
        if not complete and not open_groups:
            return ""
        parts = [f"the samples of rollouts {complete}"] if complete else []
        if open_groups:
            parts.append(f"answers to {len(open_groups)} further groups")
        return " and ".join(parts)

    # Groups

    def recover(self, group: list[Any], rollout_id: int, marks: Marks) -> list[Any] | None:
        """Return the group in its recorded state, in place of ``group``; None when the journal has none."""
        name = group_name(group)
        state = self._groups.pop(name, None) if name is not None else None
        if state is None or not _is_same_prompt(group, state):
            return None
        try:
            return [
                self._recover_entry(entry, state, index, rollout_id, marks)
                for entry, index in zip(group, state.indices, strict=True)
            ]
        except DataError as error:
            logger.warning("Group %s is generated again: %s", name, error)
            return None

    def _recover_entry(self, entry: Any, state: GroupState, index: int, rollout_id: int, marks: Marks) -> Any:
        if index not in state.entries:
            return entry
        recovered = self._load_entry(entry, state, index)
        if isinstance(recovered, list) and any(s.status is Sample.Status.ABORTED for s in leaf_samples(recovered)):
            return entry  # An interrupted fan-out cannot be continued from its parts.
        for sample in leaf_samples(recovered):
            if state.rollout_id == rollout_id:
                marks.masked[id(sample)] = sample
            if index in state.generated:
                marks.unseen[id(sample)] = sample
        return recovered

    def _load_entry(self, entry: Any, state: GroupState, index: int) -> Any:
        issued = entry.to_dict() if isinstance(entry, Sample) else None
        values: Any = issued
        for recorded in state.entries[index]:
            # A fan-out is written whole, and what follows it (the sample it restarts from) is told from the issue on.
            base = values if isinstance(values, dict) else issued
            values = self._apply(base, recorded.record, recorded.position)
        return to_entry(values)

    def _apply(self, base: dict[str, Any] | None, record: Record, position: int) -> Any:
        blob = memoryview(self._blob(record))
        offset = 0
        for earlier in record.head["entries"][:position]:
            for leaf in earlier["leaves"]:
                offset += leaf["rest"] + sum(num_bytes for _, num_bytes in leaf["packed"])
        return apply_entry(base, record.head["entries"][position], blob[offset:])[0]

    def _blob(self, record: Record) -> bytes:
        if self._blobs is None or self._blobs[0] is not record:
            self._blobs = record, record.read_blob()
        return self._blobs[1]

    # Rollouts

    def replay(self, rollout_id: int, source: SourceRecorder) -> RolloutFnTrainOutput | None:
        """Return the recorded result of a rollout, with the data source moved on as it was then; None to generate it.

        Args:
            source: asked again for everything that it gave, and given back what it got back.
        """
        rollout = self._rollouts.pop(rollout_id, None)
        is_next = rollout_id == self._next
        self._next += 1
        if rollout is None or rollout.batch is None or not rollout.is_replayable or not is_next:
            self._stop(source)
            return None
        try:
            samples = self._repeat(rollout, source)
            metrics = plain_values.loads(
                rollout.batch.read_blob(), where=f"The ledger, the metrics of rollout {rollout_id},"
            )
        except DataError as error:
            logger.warning("Rollout %d is generated again, although its samples were kept: %s", rollout_id, error)
            self._stop(source)
            return None
        for name in rollout.ended:
            self._groups.pop(name, None)
            self._given.pop(name, None)
        return RolloutFnTrainOutput(samples=samples, metrics=metrics or None)

    def _stop(self, source: SourceRecorder) -> None:
        """Generate all rollouts from here on: the recorded ones were built on one that will be another."""
        self._rollouts.clear()
        source.put_ahead(list(self._given.values()))
        self._given.clear()

    def _repeat(self, rollout: RolloutState, source: SourceRecorder) -> list[Any]:
        """Repeat the calls of the data source; return the groups that were handed over."""
        for call in rollout.calls:
            if call.wanted is None:
                [name], [state], [record] = call.names, call.states, call.records
                source.add_unrecorded([self._load_group(name, state, record)])
                if name is not None:
                    self._given.pop(name, None)
                continue
            # Groups that an earlier process left open came through the source before.
            expected = [name for name in call.names if name is None or name not in self._given]
            groups = source.take_unrecorded(call.wanted - len(call.names) + len(expected))
            names = [group_name(group) for group in groups]
            self._given |= {name: group for name, group in zip(names, groups, strict=True) if name is not None}
            if names != expected:
                raise DataError(f"the data source gives the groups {names[:8]}, where it gave {expected[:8]} before.")
        return [self._load_handed(handed) for handed in rollout.handed]

    def _load_handed(self, handed: HandedGroup) -> Any:
        group = self._load_group(handed.name, handed.state, handed.record)
        return group[0] if handed.record.head.get("flat") else group

    def _load_group(self, name: int | None, state: GroupState | None, record: Record) -> list[Any]:
        if record.head["i"] is None:
            return [to_entry(self._apply(None, record, k)) for k in range(len(record.head["entries"]))]
        if state is None or name not in self._given or not _is_same_prompt(self._given[name], state):
            raise DataError(f"group {name} is not among those that the data source gives now.")
        entries = zip(self._given[name], state.indices, strict=True)
        return [self._load_entry(entry, state, index) for entry, index in entries]
