"""The router of megatron-core, with a bias that stays fp32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from slime.backends.megatron_utils import cpu_platform  # noqa: F401

# isort: split
from megatron.core.transformer.moe.router import TopKRouter


class Router(TopKRouter):
    """TopKRouter for packed sequences.

    Invariant: ``expert_bias`` is fp32 whatever the model's dtype.  megatron-core restores the dtype at the next
    forward pass only, when a checkpoint that was loaded into the buffer has been rounded already.
    """

    expert_bias: Tensor | None

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> torch.nn.Module:
        """What ``.bfloat16()``, ``.to()`` and their like call."""
        bias = self.expert_bias
        super()._apply(fn, *args, **kwargs)
        if bias is not None and self.expert_bias is not None and self.expert_bias.dtype != bias.dtype:
            self.expert_bias = bias.to(self.expert_bias.device)
        return self
