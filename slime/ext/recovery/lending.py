"""Engines lend their memory to a restarting trainer if the rollout cannot continue without that trainer's weights.

The rollout manager runs these functions.  The driver only refers to them and so does not import engine code.
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
    """Make the engines release memory for a dead trainer if the rollout waits for it; return whether they did.

    Monitors pause meanwhile: a restarting engine sizes its memory by what is free, so none may start now.
    """
    if not _may_lend(fleet):
        return False
    fleet.pause_monitors()
    fleet.memory.release_others(partial(withdraw, fleet.memory))
    return True


def give_back(fleet: EngineFleet) -> None:
    """Make the engines resume the memory that they lent."""
    fleet.memory.take_back(None)
    fleet.resume_monitors()


def _may_lend(fleet: EngineFleet) -> bool:
    """Return whether a dead trainer may restart on the engines' GPUs.

    That holds if all engines wait for weights, or if the trained model cannot answer requests until it gets weights,
    even if engines of other models, or prefill engines without a decode engine, still serve.
    """
    model = fleet.weights.model
    is_stuck = model is not None and not answers_requests(model)
    states = {state for group in fleet.memory.groups for state in group.states}
    return not states - ({*LIVE, EngineState.RETIRED} if is_stuck else {EngineState.UPDATING, EngineState.RETIRED})


def answers_requests(model: RolloutServer) -> bool:
    """Return whether the model can answer requests: with a regular engine, or with prefill and decode engines."""
    kinds = {group.config.worker_type for group in model.groups if group.indices(*SERVES)}
    return "regular" in kinds or {"prefill", "decode"} <= kinds


def withdraw(memory: SharedMemory, places: Sequence[Place]) -> list[Place]:
    """Stop requests to engines; return those of ``places`` that are still up.

    Running requests are finished first, except those to the trained model, which are aborted as they cannot succeed.
    """
    serving = [(group, index) for group, index in places if group.states[index] is not EngineState.UPDATING]
    for group, index in serving:
        group.report(index, EngineEvent.PUSH_STARTED)
        group.delist(index)
    memory.ask("abort_all", [(group, index) for group, index in serving if group.takes_updates])
    return [(group, index) for group, index in places if group.states[index] is EngineState.UPDATING]
