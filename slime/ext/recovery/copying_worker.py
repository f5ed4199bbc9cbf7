"""A trainer rank that copies its state to its host (``--trainer-recovery memory``)."""

from __future__ import annotations

from slime.backends.megatron_utils.actor import MegatronTrainRayActor
from slime.ext.recovery.memory_copy import copy_state, restore_state
from slime.ext.recovery.state_copy import CopyFlags, StateCopy
from slime.observability.telemetry import span


class CopyingTrainRayActor(MegatronTrainRayActor):
    """A rank that resumes from its copy if it has one."""

    state_copy: StateCopy | None = None
    """Copy of the rank's state after a rollout."""

    @property
    def loads_checkpoint(self) -> bool:
        """False if :meth:`load_state` uses the copy."""
        return self.state_copy is None

    def load_state(self) -> int:
        """Load the copy; without one, load as in the base class."""
        if self.state_copy is None:
            return super().load_state()
        return restore_state(self.state_copy, self.model, self.optimizer, self.scheduler)

    def end_training(self, rollout_id: int) -> None:
        """Copy the state if a copy is due."""
        super().end_training(rollout_id)
        if CopyFlags.of(self.args).is_due(rollout_id):
            with span("copy_state"):
                self.state_copy = copy_state(rollout_id, self.model, self.optimizer, self.scheduler, self.state_copy)
