"""An old path of ``slime.ext.trackers.sinks``, kept for code written for it."""

from slime.ext.trackers.sinks import TensorboardSink as _TensorboardAdapter

__all__ = ["_TensorboardAdapter"]
