"""How long a request goes on when its engine has died, hangs or answers nonsense.

Without ``--use-fault-tolerance`` not long: the run ends and names the engine.  With it the engine is replaced, which
takes as long as an engine takes to start; the request is repeated until then.  What it had returned before is kept on
the sample, so only the answer that was under way is drawn again.
"""

from __future__ import annotations

from argparse import Namespace

DEFAULT_RETRIES = 60
"""Repetitions of a request that no engine takes, about a second apart."""
NONSENSE_WAIT_S = 2.0
"""Between an answer that cannot be used and the next try."""
NONSENSE_MARGIN_S = 30.0


def tolerates_faults(args: Namespace) -> bool:
    """Whether engines are replaced during a rollout."""
    return bool(getattr(args, "use_fault_tolerance", False))


def request_retries(args: Namespace) -> int:
    """Repetitions of a request that fails: until there can be an engine again, when there will be one."""
    if not tolerates_faults(args):
        return DEFAULT_RETRIES
    return DEFAULT_RETRIES + int(getattr(args, "engine_start_timeout_s", 1800.0) + detection_s(args))


def detection_s(args: Namespace) -> float:
    """Seconds within which the health monitor takes an engine of no use out of service."""
    interval_s = getattr(args, "rollout_health_check_interval", 30.0)
    timeout_s = getattr(args, "rollout_health_check_timeout", 30.0)
    return interval_s + timeout_s


def nonsense_patience_s(args: Namespace) -> float:
    """How long answers that cannot be used are met with another try: until the engine that gives them is gone."""
    return detection_s(args) + NONSENSE_MARGIN_S if tolerates_faults(args) else 0.0
