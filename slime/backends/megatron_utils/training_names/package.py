"""The package ``megatron.training`` if no Megatron-LM checkout provides it."""

from __future__ import annotations

from typing import Any

from megatron.training.global_vars import get_args
from megatron.training.utils import print_rank_0

__all__ = ["get_args", "print_rank_0"]


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    raise ImportError(
        f"{name} of megatron.training is not part of slime, which has get_args, print_rank_0 and "
        "arguments.core_transformer_config_from_args. Put a checkout of Megatron-LM on PYTHONPATH."
    )
