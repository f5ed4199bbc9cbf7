"""The old path of ``slime.observability.timer``, kept for code written for it."""

from slime.observability.timer import Timer, inverse_timer, timer

__all__ = ["Timer", "inverse_timer", "timer"]
