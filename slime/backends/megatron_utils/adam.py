"""The Adam over this rank's flat shards: torch's, which megatron-core builds, or a transform's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq")


class OwnAdam(torch.optim.Optimizer):
    """An Adam that replaces ``torch.optim.AdamW`` and keeps the parameter groups that megatron-core made for it.

    Args:
        param_groups: each with ``lr``, ``betas``, ``eps`` and ``weight_decay``; used as they are.
    """

    def __init__(self, param_groups: list[dict[str, Any]]) -> None:
        # torch accepts only leaf tensors, and shards of fp32 parameters are views.  Assigning param_groups afterwards
        # skips that check, as megatron-core does.
        super().__init__([{"params": []}], defaults={})
        self.param_groups = param_groups

    def initialize(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return a parameter's optimizer state, creating the initial state if there is none."""
        raise NotImplementedError

    def moment(self, parameter: Tensor, name: str) -> Tensor:
        """Return a moment as fp32 [num_elements], for a checkpoint.

        Raises:
            NotImplementedError: this Adam keeps no such moment.
        """
        raise self._no_moment(name)

    def set_moment(self, parameter: Tensor, name: str, value: Tensor) -> None:
        """Set a moment from fp32 [num_elements].

        Raises:
            NotImplementedError: this Adam keeps no such moment.
        """
        raise self._no_moment(name)

    def _no_moment(self, name: str) -> NotImplementedError:
        return NotImplementedError(
            f"{type(self).__name__} keeps no {name} that a checkpoint could hold; give --no-save-optim."
        )


def parts_of(optimizer: MegatronOptimizer) -> list[Any]:
    """Return the chained optimizers (dense parameters, experts), without empty ones."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in parts if not getattr(part, "is_stub_optimizer", False)]


def replace_adam(optimizer: MegatronOptimizer, make: Callable[[list[dict[str, Any]]], OwnAdam]) -> None:
    """Replace the AdamW in each part of a freshly built optimizer with one over the same parameter groups."""
    for part in parts_of(optimizer):
        if isinstance(part.optimizer, torch.optim.AdamW):  # leaves optimizers with their own kernels alone
            part.optimizer = make(part.optimizer.param_groups)


def fuse(optimizer: MegatronOptimizer) -> None:
    """Switch torch's AdamW to its fused kernel, one pass over memory; megatron-core builds the slow implementation."""
    for part in parts_of(optimizer):
        for group in part.optimizer.param_groups if isinstance(part.optimizer, torch.optim.AdamW) else ():
            if all(parameter.is_cuda for parameter in group["params"]):
                group["fused"], group["foreach"] = True, False
