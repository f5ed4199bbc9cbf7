"""Adam without moments: every step is the first one.

After one step from zero moments, bias correction gives back the gradient and its square:

    m = (1 - beta1) g / (1 - beta1) = g,    v = (1 - beta2) g^2 / (1 - beta2) = g^2
    p <- (1 - lr * weight_decay) p - lr * g / (|g| + eps)

so the betas have no effect, and nothing is kept from step to step: of Adam's fp32 state (master weights and two
moments) a third remains.  Adam: arXiv:1412.6980, algorithm 1; decoupled weight decay: arXiv:1711.05101.
"""

from __future__ import annotations

from typing import Any

import torch

from slime.backends.megatron_utils import cpu_platform  # noqa: F401

# isort: split
from megatron.core.optimizer import MegatronOptimizer


class StatelessAdam(torch.optim.Optimizer):
    """The step of ``torch.optim.AdamW`` from zero moments; ``state`` stays empty.

    Args:
        param_groups: as an AdamW has them, each with ``lr``, ``eps`` and ``weight_decay``; taken over as they are.
        decoupled_weight_decay: False adds the decay to the gradient, as Adam does.
    """

    def __init__(self, param_groups: list[dict[str, Any]], *, decoupled_weight_decay: bool = True) -> None:
        # torch takes leaves only, and a shard of fp32 parameters is a view; megatron-core sets its groups like this.
        super().__init__([{"params": []}], defaults={})
        self.param_groups = param_groups
        self._is_decoupled = decoupled_weight_decay

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # torch's closures have no place here
        """Update every parameter that has a gradient; beside it there is one tensor of its size at a time."""
        assert closure is None, "a closure would be called without gradients"
        for group in self.param_groups:
            lr, decay, eps = group["lr"], group["weight_decay"], group["eps"]
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is None:
                    continue
                if decay and self._is_decoupled:
                    parameter.mul_(1 - lr * decay)
                elif decay:
                    gradient = gradient + decay * parameter
                parameter.addcdiv_(gradient, gradient.abs().add_(eps), value=-lr)


def make_stateless(optimizer: MegatronOptimizer) -> None:
    """Put a :class:`StatelessAdam` over the same parameters into each part of an optimizer that was just built."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if part.optimizer is not None:  # this rank has something to train
            part.optimizer = StatelessAdam(
                part.optimizer.param_groups, decoupled_weight_decay=part.config.decoupled_weight_decay
            )
