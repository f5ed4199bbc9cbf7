"""The arguments of the process, under the names of ``megatron.training.global_vars``."""

from __future__ import annotations

from argparse import Namespace

from slime.utils.errors import ConfigError

_ARGS: list[Namespace] = []


def get_args() -> Namespace:
    """Return the arguments of the run, for this process's role.

    Raises:
        ConfigError: called outside of a trainer process, or before the trainer set them.
    """
    if not _ARGS:
        raise ConfigError("megatron.training.get_args() was called before the trainer has its arguments.")
    return _ARGS[0]


def set_args(args: Namespace) -> None:
    """Set the arguments that ``get_args`` returns."""
    _ARGS[:] = [args]
