"""How long the driver and the rollout manager wait for engines, derived from flags."""

from __future__ import annotations

START_MARGIN_S = 120.0
"""Seconds added to ``--engine-start-timeout-s``, a deadline that the engine's actor enforces once it runs."""
MAX_START_ATTEMPTS = 3
"""Attempts to start a server before the run ends."""
MEMORY_MARGIN_S = 180.0
ROLLOUT_MARGIN_S = 180.0
"""Seconds by which the manager's deadline follows the rollout function's, whose message is better.  The driver's
deadline follows by twice as much."""
MIN_WAIT_S = 1.0
"""Minimum timeout in seconds for a call that begins when its shared deadline is nearly over."""


def start_timeout_s(engine_start_timeout_s: float) -> float:
    """Return the seconds that one engine start may take, including its actor's start."""
    return engine_start_timeout_s + START_MARGIN_S


def restart_timeout_s(engine_start_timeout_s: float) -> float:
    """Return the seconds that all attempts to restart an engine may take together."""
    return MAX_START_ATTEMPTS * start_timeout_s(engine_start_timeout_s)


def memory_timeout_s(engine_start_timeout_s: float, weight_update_timeout_s: float) -> float:
    """Return the seconds for engines to release or resume their memory: pending restarts, then their answers."""
    return restart_timeout_s(engine_start_timeout_s) + weight_update_timeout_s + MEMORY_MARGIN_S
