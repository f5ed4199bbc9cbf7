"""The life of an engine as one table: state x event -> next state and action.

Whoever learns something of an engine (health monitor, driver, sender of weights, the engine's own start) reports an
event; ``EngineGroup.report`` looks the cell up, sets the state and takes the action.  Nobody else sets a state.
``scripts/make_docs.py`` prints the table into docs/engines.md.
"""

from __future__ import annotations

import enum
from typing import NamedTuple


class EngineState(enum.Enum):
    """The states of an engine."""

    STARTING = "starting"
    """Its first start, with the job; the router learns of it as soon as it serves."""
    SERVING = "serving"
    """It is in the router's list and gets requests."""
    UPDATING = "updating"
    """It takes weights, waits for the present ones, or has lent its memory; it answers no probe, rightly."""
    SUSPECT = "suspect"
    """It failed a probe and may only be slow; it keeps its requests."""
    EVICTED = "evicted"
    """It is being taken from the router's list and killed."""
    RESTARTING = "restarting"
    """Another is being started on its GPUs."""
    RETIRED = "retired"
    """There is no engine here any more, and none comes."""


class EngineEvent(enum.Enum):
    """The events that change an engine's state."""

    STARTED = "started"
    """Its server serves."""
    HEALTHY = "healthy"
    """It answered a probe."""
    FAILED_PROBE = "failed_probe"
    """It did not answer a probe and has time left to do so."""
    FAILED = "failed"
    """It gave no sign of life for as long as it may, answered nonsense, or failed a call about its memory."""
    DIED = "died"
    """One of its processes has ended."""
    PUSH_STARTED = "push_started"
    """New weights are on their way to it."""
    PUSH_DONE = "push_done"
    """It holds the present weights."""
    PUSH_REFUSED = "push_refused"
    """A push excluded it."""
    SLOT_FREE = "slot_free"
    """Its processes are gone, and its GPUs get another engine."""
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
    """Put it in the router's list, unless it is there."""
    AWAIT_WEIGHTS = "await weights"
    """Wait for the next push; where the model takes none, as if push_done had been reported too."""
    EVICT = "evict"
    """Take it from the router's list and kill it, then report slot_free, dropped or given_up."""
    RESTART = "restart"
    """Start another on its GPUs, then report started or given_up."""
    END_RUN = "end the run"
    """Keep the reason; the manager's next look at the engines raises it."""
    SHUT_DOWN = "shut down"
    """End its processes in an orderly way."""


class Step(NamedTuple):
    """A cell of the table."""

    state: EngineState
    action: Action = Action.NOTHING


_S, _E, _A = EngineState, EngineEvent, Action
_EVICT = Step(_S.EVICTED, _A.EVICT)
_SHUT_DOWN = Step(_S.RETIRED, _A.SHUT_DOWN)
_LATE_REPORTS = (_E.HEALTHY, _E.FAILED_PROBE, _E.FAILED, _E.DIED, _E.PUSH_STARTED, _E.PUSH_DONE, _E.PUSH_REFUSED)
"""Reports of monitors and senders that an eviction may overtake: they change nothing then."""


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
"""Transitions that all states of an engine with a running server share."""

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
    # A restart that was under way when the job ended reports here.
    _S.RETIRED: _ignored(_S.RETIRED, _E.SLOT_FREE, _E.DROPPED, _E.GIVEN_UP, _E.STOP) | {_E.STARTED: _SHUT_DOWN},
}
"""A cell that is missing cannot happen; reporting its event is an error of slime's."""

SERVES = (EngineState.SERVING, EngineState.SUSPECT)
"""States of an engine that gets requests."""
LIVE = (*SERVES, EngineState.UPDATING)
"""States of an engine whose server is up."""
UNSETTLED = (EngineState.STARTING, EngineState.EVICTED, EngineState.RESTARTING)
"""States that an engine leaves by itself."""


def next_step(state: EngineState, event: EngineEvent, engine: str) -> Step:
    """Return the cell of ``state`` and ``event``; ``engine`` is its name, for the error.

    Raises:
        RuntimeError: the event cannot happen in this state.
    """
    step = TABLE[state].get(event)
    if step is None:
        raise RuntimeError(
            f"{engine} is {state.value}, where {event.value} cannot happen; possible are "
            f"{', '.join(possible.value for possible in TABLE[state])}. This is a bug of slime: please report it."
        )
    return step


def table_as_markdown() -> str:
    """Return the table as docs/engines.md prints it: one row for each event, one column for each state."""
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
