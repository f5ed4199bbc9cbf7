"""State of the run in a rollout process: current rollout, group observers, and their positions in checkpoints."""

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
    """Base class for observers of prompt groups.  Subclasses override the events they need.

    The rollout calls the group events on its event loop, so they must not block.  The rollout manager calls the other
    events.
    """

    # Groups

    def answered(self, sample: Sample, entry: Entry) -> None:
        """Called with the ``entry`` that the generate function returned for ``sample``, before hooks and reward."""

    def finished(self, group: Group) -> None:
        """Called when all executions of a group are answered and rewarded, before the dynamic filter."""

    def dropped(self, group: Group, reason: str | None) -> None:
        """Called for a group that the dynamic filter drops."""

    def has_mask(self, sample: Sample) -> bool:
        """Return whether a sample restored from a record already has the current rollout's mask; called once."""
        return False

    def lacks_hooks(self, sample: Sample) -> bool:
        """Return whether sample hooks must still run on an answer restored from a record; called once."""
        return False

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics since the last call."""
        return {}

    # Rollouts

    def start(self, rollout_id: int) -> None:
        """Prepare for the first rollout of this process; the data source is positioned at its beginning."""

    def make_samples(self, rollout_id: int, generate: Callable[[], RolloutFnTrainOutput]) -> RolloutFnTrainOutput:
        """Return the samples of a rollout; ``generate`` produces them with the engines."""
        return generate()

    def trained(self, rollout_id: int) -> None:
        """Called after the optimizer has taken the steps of a rollout."""

    # Checkpoints

    def position(self, rollout_id: int) -> Any:
        """Return the state just before rollout ``rollout_id`` begins, for a checkpoint."""
        return None

    def save(self, rollout_id: int, position: Any) -> None:
        """Write the observer's part of the checkpoint after ``rollout_id``.

        Args:
            position: Result of :meth:`position` from before the next rollout; None if that has not begun.
        """

    def published(self, rollout_id: int) -> None:
        """Called when the checkpoint after ``rollout_id`` is complete."""

    def close(self) -> None:
        """Flush buffered data."""


@dataclass
class RunState:
    """The current rollout, the observers, and the staleness bound."""

    observers: tuple[GroupObserver, ...] = ()
    rollout_id: int | None = None
    """The current rollout; None before the first."""
    first_rollout_id: int | None = None
    """The first rollout of this process."""
    bound: StalenessBound | None = None
    """Created by the first pool; its clock counts weight versions from the first rollout on."""

    def begin(self, rollout_id: int | None) -> None:
        """Begin rollout ``rollout_id``; None resets the state."""
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
    """Make ``run`` the run of this process and return it."""
    _RUNS[:] = [run]
    return run


class CheckpointPosition:
    """Consistent positions of the data source and the observers, taken just before a rollout begins.

    ``train_async.py`` saves rollout k while rollout k+1 is running, whose prompts must not count as consumed.

    Invariant: ``_before[k]`` holds all positions from just before rollout k began.  A rollout never begins during a
    save.
    """

    def __init__(self, source: Any, observers: Sequence[GroupObserver] = ()) -> None:
        self._source = source
        self._observers = observers
        self._before: dict[int, tuple[bytes | None, list[Any]]] = {}
        self._lock = threading.Lock()

    def begin(self, rollout_id: int) -> None:
        """Record the positions before rollout ``rollout_id`` takes groups from the data source."""
        with self._lock:
            state = self._frozen_state()
            self._before[rollout_id] = state, [observer.position(rollout_id) for observer in self._observers]
            for old in [known for known in self._before if known < rollout_id - 1]:
                del self._before[old]

    def _frozen_state(self) -> bytes | None:
        """Pickle the state, because the rollout continues to change the samples in it."""
        state_of = getattr(self._source, "state_dict", None)
        return None if state_of is None else pickle.dumps(state_of())

    def save(self, rollout_id: int) -> None:
        """Write the positions after ``rollout_id``.

        A user-defined data source without ``state_dict``, or whose ``save`` takes no ``state``, is saved as it is now.
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
                        "groups may be missing. Give its save() a parameter `state`, the state_dict() to write.",
                        type(self._source).__name__,
                        rollout_id,
                    )
                self._source.save(rollout_id)
            for observer, position in zip(self._observers, positions, strict=True):
                observer.save(rollout_id, position)
