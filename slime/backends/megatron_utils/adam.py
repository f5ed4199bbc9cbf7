"""The Adam over this rank's flat shards: torch's, which megatron-core builds, or one of a transform's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq")


class OwnAdam(torch.optim.Optimizer):
    """An Adam in the place of ``torch.optim.AdamW``, over the parameter groups that megatron-core has made for that.

    Args:
        param_groups: each with ``lr``, ``betas``, ``eps`` and ``weight_decay``; taken over as they are.
    """

    def __init__(self, param_groups: list[dict[str, Any]]) -> None:
        # torch takes leaves only, and a shard of fp32 parameters is a view; megatron-core sets its groups like this.
        super().__init__([{"params": []}], defaults={})
        self.param_groups = param_groups

    def initialize(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return all that is kept of a parameter, as before its first step where nothing is kept yet."""
        raise NotImplementedError

    def moment(self, parameter: Tensor, name: str) -> Tensor:
        """Return a moment in fp32 [elements of the parameter], for a checkpoint.

        Raises:
            NotImplementedError: this Adam keeps none.
        """
        raise self._no_moment(name)

    def set_moment(self, parameter: Tensor, name: str, value: Tensor) -> None:
        """Store a moment from fp32 [elements of the parameter].

        Raises:
            NotImplementedError: this Adam keeps none.
        """
        raise self._no_moment(name)

    def _no_moment(self, name: str) -> NotImplementedError:
        return NotImplementedError(
            f"{type(self).__name__} keeps no {name} that a checkpoint could hold; give --no-save-optim."
        )


def parts_of(optimizer: MegatronOptimizer) -> list[Any]:
    """Return the chained optimizers, of experts and of dense parameters, without empty ones."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in parts if not getattr(part, "is_stub_optimizer", False)]


def replace_adam(optimizer: MegatronOptimizer, make: Callable[[list[dict[str, Any]]], OwnAdam]) -> None:
    """Put an Adam of the same parameter groups into each part of an optimizer that was just built."""
    for part in parts_of(optimizer):
        if isinstance(part.optimizer, torch.optim.AdamW):  # not one with its own kernels
            part.optimizer = make(part.optimizer.param_groups)


def fuse(optimizer: MegatronOptimizer) -> None:
    """Let torch's AdamW update each parameter in one pass over its memory; megatron-core asks for its slow form."""
    for part in parts_of(optimizer):
        for group in part.optimizer.param_groups if isinstance(part.optimizer, torch.optim.AdamW) else ():
            if all(parameter.is_cuda for parameter in group["params"]):
                group["fused"], group["foreach"] = True, False
