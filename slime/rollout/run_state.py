"""The run of a rollout process: its rollouts, what observes their groups, and what a checkpoint holds of both."""

from __future__ import annotations

import inspect
import logging
import pickle
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slime.rollout.base_types import Entry, Group, RolloutFnTrainOutput
from slime.utils.types import Sample

if TYPE_CHECKING:
    from slime.rollout.staleness import StalenessBound

logger = logging.getLogger(__name__)


class GroupObserver:
    """An observer of prompt groups.  A subclass overrides the events that it needs.

    The rollout calls the events of groups on its event loop, so they must return at once; the rollout manager calls
    the others.
    """

    # Groups

    def answered(self, sample: Sample, entry: Entry) -> None:
        """See what the generate function made of ``sample``; sample hooks and reward are still to come."""

    def finished(self, group: Group) -> None:
        """See a group whose executions are all answered and rewarded; the dynamic filter may still drop it."""

    def dropped(self, group: Group, reason: str | None) -> None:
        """See a group that is not trained."""

    def has_mask(self, sample: Sample) -> bool:
        """Return whether a sample came back from a record with the mask of the rollout in progress; asked once."""
        return False

    def lacks_hooks(self, sample: Sample) -> bool:
        """Return whether an answer came back from a record that the sample hooks have not seen; asked once."""
        return False

    def take_metrics(self) -> dict[str, float]:
        """Return metrics since the last call."""
        return {}

    # Rollouts

    def start(self, rollout_id: int) -> None:
        """Prepare for the first rollout of this process; the data source stands where that one begins."""

    def make_samples(self, rollout_id: int, generate: Callable[[], RolloutFnTrainOutput]) -> RolloutFnTrainOutput:
        """Return the samples of a rollout; ``generate`` asks the engines for them."""
        return generate()

    def trained(self, rollout_id: int) -> None:
        """See that the optimizer took the steps of a rollout."""

    # Checkpoints

    def position(self, rollout_id: int) -> Any:
        """Return what a checkpoint must hold of the moment before rollout ``rollout_id`` begins."""
        return None

    def save(self, rollout_id: int, position: Any) -> None:
        """Write what belongs to the checkpoint after ``rollout_id``.

        Args:
            position: of :meth:`position`, from before the next rollout began; None where it has not begun.
        """

    def published(self, rollout_id: int) -> None:
        """See that the checkpoint after ``rollout_id`` counts."""

    def close(self) -> None:
        """Write what is in memory."""


@dataclass
class RunState:
    """The rollout in progress, the observers, and the count of weight versions."""

    observers: tuple[GroupObserver, ...] = ()
    rollout_id: int | None = None
    """The rollout in progress; None before the first."""
    first_rollout_id: int | None = None
    """The rollout that this process began with."""
    bound: StalenessBound | None = None
    """Made by the first pool; its clock counts the versions from the first rollout on."""

    def begin(self, rollout_id: int | None) -> None:
        """Announce rollout ``rollout_id``; None forgets all rollouts before."""
        self.rollout_id = rollout_id
        if rollout_id is None or self.first_rollout_id is None:
            self.first_rollout_id = rollout_id
        if rollout_id is None:
            self.bound = None


_RUNS: list[RunState] = [RunState()]
"""The run of this process."""


def current_run() -> RunState:
    """Return the run of this process."""
    return _RUNS[0]


def use_run(run: RunState) -> RunState:
    """Make ``run`` the run of this process, and return it."""
    _RUNS[:] = [run]
    return run


class CheckpointPosition:
    """Positions of data source and observers, always of one moment: before a rollout began.

    ``train_async.py`` saves rollout k while k+1 is under way; its prompts must not count as consumed.

    Invariant: ``_before[k]`` is what all of them said just before rollout k began.  A rollout begins before a save or
    after it, never while one is written.
    """

    def __init__(self, source: Any, observers: Sequence[GroupObserver] = ()) -> None:
        self._source = source
        self._observers = observers
        self._before: dict[int, tuple[bytes | None, list[Any]]] = {}
        self._lock = threading.Lock()

    def begin(self, rollout_id: int) -> None:
        """Keep the positions from before rollout ``rollout_id`` takes groups from the data source."""
        with self._lock:
            state = self._frozen_state()
            self._before[rollout_id] = state, [observer.position(rollout_id) for observer in self._observers]
            for old in [known for known in self._before if known < rollout_id - 1]:
                del self._before[old]

    def _frozen_state(self) -> bytes | None:
        """Freeze the state by pickling: it shares its samples with the rollout, which continues to change them."""
        state_of = getattr(self._source, "state_dict", None)
        return None if state_of is None else pickle.dumps(state_of())

    def save(self, rollout_id: int) -> None:
        """Write the positions after ``rollout_id``.

        A user's data source that has no ``state_dict``, or whose ``save`` takes no ``state``, is saved as it is now.
        """
        with self._lock:
            is_ahead = rollout_id + 1 in self._before
            state, positions = self._before.get(rollout_id + 1, (None, [None] * len(self._observers)))
            if state is not None and "state" in inspect.signature(self._source.save).parameters:
                self._source.save(rollout_id, state=pickle.loads(state))
            else:
                if is_ahead:
                    logger.warning(
                        "%s is saved after rollout %d while the next one takes groups from it: after a crash those "
                        "may be missing. Give its save() a parameter `state`, a state_dict() to write.",
                        type(self._source).__name__,
                        rollout_id,
                    )
                self._source.save(rollout_id)
            for observer, position in zip(self._observers, positions, strict=True):
                observer.save(rollout_id, position)
