"""An old path of ``slime.ext.trackers.sinks``, kept for code written for it."""

from slime.ext.trackers.sinks import WandbSink as WandbTracker

__all__ = ["WandbTracker"]
