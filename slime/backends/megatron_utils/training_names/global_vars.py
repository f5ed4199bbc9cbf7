"""The arguments of the process, under the names of ``megatron.training.global_vars``."""

from __future__ import annotations

from argparse import Namespace

from slime.utils.errors import ConfigError

_ARGS: list[Namespace] = []


def get_args() -> Namespace:
    """Return the arguments of the run, those of this process's role.

    Raises:
        ConfigError: asked outside a trainer process.
    """
    if not _ARGS:
        raise ConfigError("megatron.training.get_args() was called before the trainer has its arguments.")
    return _ARGS[0]


def set_args(args: Namespace) -> None:
    """Set what ``get_args`` returns."""
    _ARGS[:] = [args]
