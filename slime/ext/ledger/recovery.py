"""Recovery from the journal: replays complete rollouts and continues open groups.

The data source is at the checkpoint's position and returns the same groups again in the same order.  So nothing is put
into it: when it returns a group that the journal knows, the group is brought to its recorded state.  A rollout whose
train data was complete is not generated again: its calls to the data source are repeated, and the recorded samples are
handed over.
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
    """Records a data source's calls, and brings the groups that it returns to their recorded state.

    Replaces the source's two methods; nested calls inside these are not recorded.
    """

    def __init__(
        self, source: Any, journal: Journal, recover: Callable[[list[Any]], list[Any] | None] = lambda group: None
    ) -> None:
        """Record the calls of ``source`` from now on.

        Args:
            recover: returns a group in its recorded state, or None if the journal does not know it.
        """
        self._get, self._add = source.get_samples, source.add_samples
        self._journal = journal
        self._recover = recover
        self._ahead: deque[list[Any]] = deque()
        self._is_inside = False
        source.get_samples, source.add_samples = self.get_samples, self.add_samples

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """Return the source's next groups, with the progress made by an earlier process."""
        if self._is_inside:
            return self._get(num_samples)
        num_ahead = len(self._ahead)
        groups = self.take_unrecorded(num_samples)
        recovered = [self._recover(group) for group in groups]
        groups = [known or group for known, group in zip(recovered, groups, strict=True)]
        self._journal.record_issued(num_samples, groups, [known is not None for known in recovered])
        # Only after that record, so that the next record, a difference, includes the removal of the error.
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
        """Return groups put ahead, then the source's next ones, without recording."""
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
        """Queue groups that the source returned before, ahead of its next ones."""
        self._ahead.extend(groups)

    @property
    def ahead(self) -> list[list[Any]]:
        """Groups put ahead and not requested yet."""
        return list(self._ahead)


def _forget_failed_rewards(group: list[Any]) -> None:
    """Undo what ``--rm-failure-policy`` did to samples, so that the pool grades them again.

    Environment rewards are not requested again.
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
    """Return whether the group from the data source has the recorded prompt; the data may have changed."""
    first = next(leaf_samples(group), None)
    return first is not None and len(group) == len(state.indices) and prompt_start(first.prompt) == state.prompt


class Marks(NamedTuple):
    """``id`` -> recovered sample, for samples that the rollout has not queried yet."""

    masked: dict[int, Sample]
    """Samples whose mask was set in the current rollout."""
    unseen: dict[int, Sample]
    """Samples whose answer no sample hook has seen."""


class Recovery:
    """Everything recorded after a checkpoint and not used yet.

    Invariant: all of it is in segments from ``first_segment`` on.
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
        """Read the journal from ``first_segment`` on (heads only; samples are read when needed).

        Args:
            open_groups: groups that the source had returned and that were open when the checkpoint was made.
        """
        state = ReplayState(fingerprint).read(read_folder(folder, first_segment=first_segment))
        for rollout in state.rollouts.values():
            if rollout.rollout_id < start_rollout_id:
                state.forget_ended(rollout)
        self._groups = {name: group for name, group in state.groups.items() if group.entries}
        self._rollouts = {k: rollout for k, rollout in state.rollouts.items() if k >= start_rollout_id}
        self._next = start_rollout_id
        self._given: dict[int, list[Any]] = {}
        """Open groups that the source returned before the checkpoint or to replayed rollouts."""
        ended = set().union(*(rollout.ended for k, rollout in state.rollouts.items() if k < start_rollout_id))
        for group in open_groups:
            name = group_name(group)
            if name is not None and name not in ended:  # it may have been filtered right after the position was taken
                self._given[name] = group
        self._blobs: tuple[Record, bytes] | None = None
        if state.damage:
            logger.error(
                "The ledger %s is damaged, %s. Everything recorded after that is generated again; no prompt is lost.",
                folder,
                state.damage,
            )
        if state.other_flags:
            own = fingerprint[SAMPLE_FLAGS]
            changed = [name for name in own if own[name] != state.other_flags.get(name)]
            logger.warning(
                "Samples of an earlier process in the ledger %s are not used, because these flags differ: %s.",
                folder,
                ", ".join(changed),
            )

    @property
    def first_segment(self) -> int:
        """Oldest segment still needed; ``NO_SEGMENT`` if none is."""
        groups = [state.segment for state in self._groups.values()]
        rollouts = [rollout.segment for rollout in self._rollouts.values() if rollout.batch is not None]
        return min(groups + rollouts, default=NO_SEGMENT)

    @property
    def is_used_up(self) -> bool:
        return self.first_segment == NO_SEGMENT and not self._given

    @property
    def given(self) -> list[list[Any]]:
        """Groups that the source will not return again and that no rollout of this process has used yet."""
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
        """Return ``group`` in its recorded state; None if the journal does not know it."""
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
            # A fan-out is written whole; a record after it (the sample it restarts from) is relative to the issue.
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
        """Return a rollout's recorded result and advance the data source accordingly; None to generate the rollout.

        Args:
            source: its recorded calls are repeated.
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
        """Stop replaying: later recorded rollouts build on one that will be generated differently."""
        self._rollouts.clear()
        source.put_ahead(list(self._given.values()))
        self._given.clear()

    def _repeat(self, rollout: RolloutState, source: SourceRecorder) -> list[Any]:
        """Repeat the rollout's calls to the data source; return the groups that were handed over."""
        for call in rollout.calls:
            if call.wanted is None:
                [name], [state], [record] = call.names, call.states, call.records
                source.add_unrecorded([self._load_group(name, state, record)])
                if name is not None:
                    self._given.pop(name, None)
                continue
            # Groups left open by an earlier process were already returned by the source.
            expected = [name for name in call.names if name is None or name not in self._given]
            groups = source.take_unrecorded(call.wanted - len(call.names) + len(expected))
            names = [group_name(group) for group in groups]
            self._given |= {name: group for name, group in zip(names, groups, strict=True) if name is not None}
            if names != expected:
                raise DataError(f"the data source returns groups {names[:8]}, but returned {expected[:8]} before.")
        return [self._load_handed(handed) for handed in rollout.handed]

    def _load_handed(self, handed: HandedGroup) -> Any:
        group = self._load_group(handed.name, handed.state, handed.record)
        return group[0] if handed.record.head.get("flat") else group

    def _load_group(self, name: int | None, state: GroupState | None, record: Record) -> list[Any]:
        if record.head["i"] is None:
            return [to_entry(self._apply(None, record, k)) for k in range(len(record.head["entries"]))]
        if state is None or name not in self._given or not _is_same_prompt(self._given[name], state):
            raise DataError(f"group {name} is not among those that the data source returns now.")
        entries = zip(self._given[name], state.indices, strict=True)
        return [self._load_entry(entry, state, index) for entry, index in entries]
