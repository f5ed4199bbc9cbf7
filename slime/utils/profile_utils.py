"""The old path of ``slime.observability.profile_utils``, kept for code written for it."""

from slime.observability.profile_utils import TrainProfiler

__all__ = ["TrainProfiler"]
