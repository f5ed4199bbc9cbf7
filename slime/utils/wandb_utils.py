"""Old path of ``slime.ext.trackers.sinks``."""

from slime.ext.trackers.sinks import WandbSink as WandbTracker

__all__ = ["WandbTracker"]
