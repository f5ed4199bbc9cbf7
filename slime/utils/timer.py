"""Old path of ``slime.observability.timer``."""

from slime.observability.timer import Timer, inverse_timer, timer

__all__ = ["Timer", "inverse_timer", "timer"]
