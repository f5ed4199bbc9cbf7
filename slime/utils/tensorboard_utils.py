"""The old path of ``slime.observability.tensorboard_utils``, kept for code written for it."""

from slime.observability.tensorboard_utils import _TensorboardAdapter

__all__ = ["_TensorboardAdapter"]
