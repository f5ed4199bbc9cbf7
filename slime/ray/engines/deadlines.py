"""How long the driver and the rollout manager wait for engines; flags give the times."""

from __future__ import annotations

from argparse import Namespace

START_MARGIN_S = 120.0
"""Of a start beyond ``--engine-start-timeout-s``, which the engine's actor keeps itself once it runs."""
MAX_START_ATTEMPTS = 3
"""Starts of a server, one after the other, before the run is given up."""
MEMORY_MARGIN_S = 180.0
ROLLOUT_MARGIN_S = 180.0
"""The rollout function has its own deadline and the better message; the manager's comes later, the driver's last."""
MIN_WAIT_S = 1.0
"""Least time for a call whose turn comes late."""


def start_timeout_s(engine_start_timeout_s: float) -> float:
    """Return the time that one start of an engine may take, its actor's included."""
    return engine_start_timeout_s + START_MARGIN_S


def restart_timeout_s(engine_start_timeout_s: float) -> float:
    """Return the time that all attempts to restart an engine may take."""
    return MAX_START_ATTEMPTS * start_timeout_s(engine_start_timeout_s)


def memory_timeout_s(args: Namespace) -> float:
    """Return the deadline for engines to release their memory or take it back: restarts come first, then answers."""
    return restart_timeout_s(args.engine_start_timeout_s) + args.weight_update_timeout_s + MEMORY_MARGIN_S
