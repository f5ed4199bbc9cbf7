"""Values that are carried through a rollout beside its samples.

Every function below the entry points takes a :class:`RolloutContext`.  The entry points themselves have the signatures
that plug-ins call and replace (``generate(args, sample, sampling_params)``), so they find theirs with ``context_of``.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass, field
from typing import Any, Protocol

from slime.rollout.config import RolloutConfig, rollout_config
from slime.rollout.staleness import StalenessBound


class GroupJournal:
    """Record of what becomes of groups: the journal of the ledger is one, and this one records nothing."""

    def record_response(self, sample: Any, entry: Any) -> None:
        """Record that the generate function made ``entry`` of ``sample``; hooks and reward are still to come."""

    def record_finished(self, group: list[Any]) -> None:
        """Record a group of which every execution is answered and rewarded."""

    def record_filtered(self, group: list[Any], reason: str | None) -> None:
        """Record that a group is not trained, and why."""


class GroupFeedback:
    """Receiver of finished groups, for a data source that chooses prompts by them; this one ignores them."""

    def observe(self, group: list[Any]) -> None:
        """See a finished group, dropped ones included."""

    def take_metrics(self) -> dict[str, float]:
        """Return metrics since the last call."""
        return {}


class EntryPoints(Protocol):
    """The module ``slime.rollout.sglang_rollout``: plug-ins replace its names, so they are looked up at every call."""

    GenerateState: Any
    generate: Any
    generate_and_rm: Any
    generate_and_rm_group: Any
    load_function: Any
    async_rm: Any
    batched_async_rm: Any
    eval_rollout_single_dataset: Any


@dataclass
class RunState:
    """State that outlives a rollout: its number, the journal, and the count of weight versions."""

    journal: GroupJournal = field(default_factory=GroupJournal)
    feedback: GroupFeedback = field(default_factory=GroupFeedback)
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


@dataclass(frozen=True)
class RolloutContext:
    """Flags, entry points and run of a rollout.  Flags are read when it is made: once a rollout."""

    args: Namespace
    """All flags, for plug-ins."""
    config: RolloutConfig
    entry_points: EntryPoints
    run: RunState

    @property
    def journal(self) -> GroupJournal:
        """The journal of the run."""
        return self.run.journal

    def state(self) -> Any:
        """Return the ``GenerateState`` of this process."""
        return self.entry_points.GenerateState(self.args)


_RUNS: list[RunState] = [RunState()]
"""The run of this process."""
_ROLLOUTS: list[RolloutContext] = []
"""The context of the rollout in progress."""


def current_run() -> RunState:
    """Return the run of this process."""
    return _RUNS[0]


def use_run(run: RunState) -> RunState:
    """Make ``run`` the run of this process, and return it."""
    _RUNS[:] = [run]
    _ROLLOUTS.clear()
    return run


def begin_rollout(args: Namespace, entry_points: EntryPoints) -> RolloutContext:
    """Make the context of a rollout from the flags as they are now; entry points called with ``args`` share it."""
    _ROLLOUTS[:] = [RolloutContext(args, rollout_config(args), entry_points, current_run())]
    return _ROLLOUTS[0]


def context_of(args: Namespace, entry_points: EntryPoints) -> RolloutContext:
    """Return the context of the rollout in progress; for other flags than its own, one made from these.

    The only place where an entry point that a plug-in calls finds what its signature does not carry.
    """
    for context in _ROLLOUTS:
        if context.args is args:
            return context
    return RolloutContext(args, rollout_config(args), entry_points, current_run())
