"""Memory that engines lend to a trainer that died during a rollout, and that no answer of the rollout does without.

The rollout manager runs these functions; the driver only names them, and imports no engine for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from slime.ray.engines.lifecycle import LIVE, SERVES, EngineEvent, EngineState

if TYPE_CHECKING:
    from slime.ray.engines.fleet import EngineFleet
    from slime.ray.engines.memory import Place, SharedMemory
    from slime.ray.engines.models import RolloutServer


def lend(fleet: EngineFleet) -> bool:
    """Have the engines make room for a trainer that died, where the rollout waits for it; return whether they do.

    They are not watched meanwhile: one that starts sizes its memory by what is free, so not beside a trainer.
    """
    if not _may_lend(fleet):
        return False
    fleet.pause_monitors()
    fleet.memory.release_others(partial(withdraw, fleet.memory))
    return True


def give_back(fleet: EngineFleet) -> None:
    """Have the engines take back what they lent."""
    fleet.memory.take_back(None)
    fleet.resume_monitors()


def _may_lend(fleet: EngineFleet) -> bool:
    """Return whether a trainer that died may start on the engines' GPUs.

    So it is where all engines wait for weights, or where no request to the trained model is answered before it gets
    weights, whoever else serves: engines of other models, or those that prefill without one that decodes.
    """
    model = fleet.weights.model
    is_stuck = model is not None and not answers_requests(model)
    states = {state for group in fleet.memory.groups for state in group.states}
    return not states - ({*LIVE, EngineState.RETIRED} if is_stuck else {EngineState.UPDATING, EngineState.RETIRED})


def answers_requests(model: RolloutServer) -> bool:
    """Return whether a request finds the engines that it takes: one, or one that prefills and one that decodes."""
    kinds = {group.config.worker_type for group in model.groups if group.indices(*SERVES)}
    return "regular" in kinds or {"prefill", "decode"} <= kinds


def withdraw(memory: SharedMemory, places: Sequence[Place]) -> list[Place]:
    """Let engines get no request; return those of ``places`` that are still up.

    What they are answering comes first, except from the trained model: nothing comes of a request to that.
    """
    serving = [(group, index) for group, index in places if group.states[index] is not EngineState.UPDATING]
    for group, index in serving:
        group.report(index, EngineEvent.PUSH_STARTED)
        group.delist(index)
    memory.ask("abort_all", [(group, index) for group, index in serving if group.takes_updates])
    return [(group, index) for group, index in places if group.states[index] is EngineState.UPDATING]
