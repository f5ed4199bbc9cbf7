"""Old path of ``slime.ext.trackers.sinks``."""

from slime.ext.trackers.sinks import TensorboardSink as _TensorboardAdapter

__all__ = ["_TensorboardAdapter"]
