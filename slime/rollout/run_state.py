"""State of a process that outlives a rollout: its number, what observes it, and the count of weight versions."""

from __future__ import annotations

from dataclasses import dataclass

from slime.rollout.config import RolloutConfig
from slime.rollout.observer import GroupObserver
from slime.rollout.staleness import StalenessBound


@dataclass
class RunState:
    """The rollout in progress, the observers, and the count of weight versions."""

    observers: tuple[GroupObserver, ...] = ()
    rollout_id: int | None = None
    """The rollout in progress; None before the first."""
    first_rollout_id: int | None = None
    """The rollout that this process began with."""
    _bound: StalenessBound | None = None

    def begin(self, rollout_id: int | None) -> None:
        """Announce rollout ``rollout_id``; None forgets all rollouts before."""
        self.rollout_id = rollout_id
        if rollout_id is None or self.first_rollout_id is None:
            self.first_rollout_id = rollout_id
        if rollout_id is None:
            self._bound = None

    def bound(self, config: RolloutConfig) -> StalenessBound:
        """Return the bound of this run, whose clock counts the versions from the first rollout on."""
        if self._bound is None:
            self._bound = StalenessBound(config, first_rollout_id=self.first_rollout_id)
        return self._bound


_RUNS: list[RunState] = [RunState()]
"""The run of this process."""


def current_run() -> RunState:
    """Return the run of this process."""
    return _RUNS[0]


def use_run(run: RunState) -> RunState:
    """Make ``run`` the run of this process, and return it."""
    _RUNS[:] = [run]
    return run
