"""The seam for what follows a run's prompt groups: the ledger, and a mixture that learns from rewards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from slime.rollout.base_types import Entry, Group, RolloutFnTrainOutput
from slime.utils.types import Sample


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
