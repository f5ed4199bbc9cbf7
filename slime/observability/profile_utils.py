"""Old path of ``slime.ext.profiler.sink``."""

from slime.ext.profiler.sink import TrainProfiler

__all__ = ["TrainProfiler"]
