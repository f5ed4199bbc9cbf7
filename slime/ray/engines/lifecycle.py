"""The lifecycle of an engine as one table: state x event -> next state and action.

Health monitors, the driver, weight senders and engine starts report events.  ``EngineGroup.report`` looks up the cell,
sets the state and takes the action.  Nothing else sets a state.
``scripts/make_docs.py`` prints the table into docs/engines.md.
"""

from __future__ import annotations

import enum
from typing import NamedTuple


class EngineState(enum.Enum):
    """The states of an engine."""

    STARTING = "starting"
    """It is in its first start, with the job; it registers with the router as soon as it serves."""
    SERVING = "serving"
    """It is registered with the router and gets requests."""
    UPDATING = "updating"
    """It takes or awaits the current weights, or has released its memory; it need not answer probes."""
    SUSPECT = "suspect"
    """It failed a probe but may only be slow; it keeps its requests."""
    EVICTED = "evicted"
    """It is being removed from the router and killed."""
    RESTARTING = "restarting"
    """A replacement is starting on its GPUs."""
    RETIRED = "retired"
    """It is gone and will not be replaced."""


class EngineEvent(enum.Enum):
    """The events that change an engine's state."""

    STARTED = "started"
    """Its server serves."""
    HEALTHY = "healthy"
    """It answered a probe."""
    FAILED_PROBE = "failed_probe"
    """It did not answer a probe but still has time to."""
    FAILED = "failed"
    """It showed no sign of life within its time limit, gave a wrong answer, or failed to release or resume memory."""
    DIED = "died"
    """One of its processes has ended."""
    PUSH_STARTED = "push_started"
    """A push to it has begun, or it must wait for the next push."""
    PUSH_DONE = "push_done"
    """It holds the current weights."""
    PUSH_REFUSED = "push_refused"
    """A push excluded it."""
    SLOT_FREE = "slot_free"
    """Its processes are gone, and a replacement may start on its GPUs."""
    DROPPED = "dropped"
    """Its processes are gone, and the run continues without it (``--weight-push-failure drop``)."""
    GIVEN_UP = "given_up"
    """It cannot be restarted, and the run cannot continue without it."""
    STOP = "stop"
    """The job ends."""


class Action(enum.Enum):
    """The actions that a group takes on an event."""

    NOTHING = ""
    REGISTER = "register"
    """Register it with the router unless it is registered."""
    AWAIT_WEIGHTS = "await weights"
    """Wait for the next push.  If the model takes no pushes, act as if push_done had also been reported."""
    EVICT = "evict"
    """Remove it from the router and kill it, then report slot_free, dropped or given_up."""
    RESTART = "restart"
    """Start a replacement on its GPUs, then report started or given_up."""
    END_RUN = "end the run"
    """Store the reason; the manager raises it at its next check of the engines."""
    SHUT_DOWN = "shut down"
    """Shut its processes down cleanly."""


class Step(NamedTuple):
    """A cell of the table."""

    state: EngineState
    action: Action = Action.NOTHING


_S, _E, _A = EngineState, EngineEvent, Action
_EVICT = Step(_S.EVICTED, _A.EVICT)
_SHUT_DOWN = Step(_S.RETIRED, _A.SHUT_DOWN)
_LATE_REPORTS = (_E.HEALTHY, _E.FAILED_PROBE, _E.FAILED, _E.DIED, _E.PUSH_STARTED, _E.PUSH_DONE, _E.PUSH_REFUSED)
"""Reports that may arrive after an eviction; they then change nothing."""


def _ignored(state: EngineState, *more: EngineEvent) -> dict[EngineEvent, Step]:
    return dict.fromkeys((*_LATE_REPORTS, *more), Step(state))


_UP: dict[EngineEvent, Step] = {
    _E.FAILED: _EVICT,
    _E.DIED: _EVICT,
    _E.PUSH_STARTED: Step(_S.UPDATING),
    _E.PUSH_DONE: Step(_S.SERVING),
    _E.PUSH_REFUSED: _EVICT,
    _E.STOP: _SHUT_DOWN,
}
"""Transitions shared by all states with a running server."""

TABLE: dict[EngineState, dict[EngineEvent, Step]] = {
    _S.STARTING: {_E.STARTED: Step(_S.SERVING), _E.STOP: _SHUT_DOWN},
    _S.SERVING: _UP | {_E.HEALTHY: Step(_S.SERVING), _E.FAILED_PROBE: Step(_S.SUSPECT)},
    _S.UPDATING: _UP
    | {
        _E.HEALTHY: Step(_S.UPDATING),
        _E.FAILED_PROBE: Step(_S.UPDATING),
        _E.PUSH_DONE: Step(_S.SERVING, _A.REGISTER),
    },
    _S.SUSPECT: _UP | {_E.HEALTHY: Step(_S.SERVING), _E.FAILED_PROBE: Step(_S.SUSPECT)},
    _S.EVICTED: _ignored(_S.EVICTED)
    | {
        _E.SLOT_FREE: Step(_S.RESTARTING, _A.RESTART),
        _E.DROPPED: Step(_S.RETIRED),
        _E.GIVEN_UP: Step(_S.RETIRED, _A.END_RUN),
        _E.STOP: _SHUT_DOWN,
    },
    _S.RESTARTING: _ignored(_S.RESTARTING)
    | {
        _E.STARTED: Step(_S.UPDATING, _A.AWAIT_WEIGHTS),
        _E.GIVEN_UP: Step(_S.RETIRED, _A.END_RUN),
        _E.STOP: _SHUT_DOWN,
    },
    # A restart in progress when the job ended still reports.
    _S.RETIRED: _ignored(_S.RETIRED, _E.SLOT_FREE, _E.DROPPED, _E.GIVEN_UP, _E.STOP) | {_E.STARTED: _SHUT_DOWN},
}
"""A missing cell cannot happen; reporting its event is a bug in slime."""

SERVES = (EngineState.SERVING, EngineState.SUSPECT)
"""States in which an engine gets requests."""
LIVE = (*SERVES, EngineState.UPDATING)
"""States in which an engine's server is up."""
UNSETTLED = (EngineState.STARTING, EngineState.EVICTED, EngineState.RESTARTING)
"""States that an engine leaves without a further push or request."""


def next_step(state: EngineState, event: EngineEvent, engine: str) -> Step:
    """Return the cell for ``state`` and ``event``; ``engine`` is the engine's name, for the error.

    Raises:
        RuntimeError: the event cannot happen in this state.
    """
    step = TABLE[state].get(event)
    if step is None:
        raise RuntimeError(
            f"{engine} is {state.value}, where {event.value} cannot happen; possible are "
            f"{', '.join(possible.value for possible in TABLE[state])}. This is a bug in slime: please report it."
        )
    return step


def table_as_markdown() -> str:
    """Return the table for docs/engines.md: one row per event, one column per state."""
    lines = [
        "| event | " + " | ".join(state.value for state in EngineState) + " |",
        "|---|" + "---|" * len(EngineState),
    ]
    for event in EngineEvent:
        cells = [_cell(state, TABLE[state].get(event)) for state in EngineState]
        lines.append(f"| `{event.value}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(state: EngineState, step: Step | None) -> str:
    if step is None:
        return ""
    name = "stays" if step.state is state else f"**{step.state.value}**"
    return f"{name}: {step.action.value}" if step.action is not Action.NOTHING else name
