"""The load of the experts: how many tokens of a step each layer's router sent to each of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slime.backends.megatron_utils.data import current_device, sum_over_ranks
from slime.backends.megatron_utils.layers.router import Router


class ExpertLoad:
    """Counts of the training passes of one step, over all ranks."""

    def __init__(self, model: Sequence[torch.nn.Module], num_layers: int, num_experts: int) -> None:
        """Have the routers of ``model`` count; those of multi-token prediction are left out.

        Args:
            model: this rank's chunks.
            num_layers: of the whole model.
            num_experts: of a layer.
        """
        self._shape = (num_layers, num_experts)
        self._routers = [
            module
            for chunk in model
            for name, module in chunk.named_modules()
            if isinstance(module, Router) and "mtp" not in name.split(".")
        ]
        for router in self._routers:
            router.counts_load = True

    def take_metrics(self) -> dict[str, float]:
        """Return :func:`load_metrics` of the passes since the last call.  Collective."""
        counts = torch.zeros(self._shape, dtype=torch.int64, device=current_device())
        for router in self._routers:
            if router.load is not None:
                counts[router.layer_number - 1] += router.load.to(counts)
                router.load = None
        return load_metrics(sum_over_ranks(counts))


def load_metrics(counts_LE: Tensor) -> dict[str, float]:
    """Return the balance of every layer that routed tokens.

    Args:
        counts_LE: tokens of each expert in each layer.

    Returns:
        ``expert_load/layer_{n}/max_over_mean`` (1 is balanced, E is all on one), ``.../idle`` (share of the experts
        without a token), layers counted from 1; and ``expert_load/worst_max_over_mean`` and
        ``expert_load/worst_idle``, the largest of the layers.
    """
    metrics: dict[str, float] = {}
    for layer, counts_E in enumerate(counts_LE.double().cpu(), start=1):
        if counts_E.sum() > 0:
            metrics[f"expert_load/layer_{layer}/max_over_mean"] = float(counts_E.max() / counts_E.mean())
            metrics[f"expert_load/layer_{layer}/idle"] = float((counts_E == 0).double().mean())
    for name in ("max_over_mean", "idle") if metrics else ():
        metrics[f"expert_load/worst_{name}"] = max(value for key, value in metrics.items() if key.endswith(name))
    return metrics
