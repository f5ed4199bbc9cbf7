"""Estimates, from a sample of the weights, how much of a training step a push's cast to a narrower dtype loses."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slime.backends.megatron_utils.parameters import Shard, iter_shards
from slime.backends.megatron_utils.update_weight.gather import HostWeights, sent_dtype
from slime.weights.named_tensors import dtype_name

logger = logging.getLogger(__name__)

SAMPLES_PER_TENSOR = 1024
WARN_ABOVE = 0.5
"""Share of the changed weights whose change the cast loses, above which a warning is logged."""


@dataclass(frozen=True, slots=True)
class CastLoss:
    """Counts of sampled weights since the last push."""

    num_moved: int
    """Weights that changed in the trainer."""
    num_lost: int
    """Those of them that are unchanged after the cast."""

    @property
    def share(self) -> float:
        """``num_lost / num_moved``; 0 if nothing moved."""
        return self.num_lost / max(self.num_moved, 1)


class CastLossEstimate:
    """A sample of this rank's weights at the last push, only of those that the cast makes narrower."""

    def __init__(self, model: Sequence[torch.nn.Module], dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._shards: list[Shard] = []
        seen: set[str] = set()
        for shard in iter_shards(model):
            if getattr(shard.parameter, "has_no_data", False):
                continue
            held, sent = shard.parameter.dtype, sent_dtype(shard, dtype)
            if shard.key not in seen and torch.promote_types(held, sent) != sent:
                seen.add(shard.key)
                self._shards.append(shard)
        self._last: list[Tensor] | None = None
        self._has_warned = False

    @torch.no_grad()
    def compare(self, host_weights: HostWeights | None) -> CastLoss | None:
        """Return the loss since the last call; None in the first call, and if no weight is made narrower.

        Args:
            host_weights: host copies to read while the trainer sleeps; None reads the live parameters.
        """
        if not self._shards:
            return None
        now = [
            _sampled(shard.parameter if host_weights is None else host_weights[shard.key]) for shard in self._shards
        ]
        last, self._last = self._last, now
        if last is None:
            return None
        num_moved, num_lost = 0, 0
        for old, new in zip(last, now, strict=True):
            has_moved = old != new
            num_moved += int(has_moved.sum())
            num_lost += int((has_moved & (old.to(self._dtype) == new.to(self._dtype))).sum())
        return CastLoss(num_moved, num_lost)

    def warn_of(self, loss: CastLoss) -> None:
        """Warn once if the lost share is above :data:`WARN_ABOVE`."""
        if loss.share <= WARN_ABOVE or self._has_warned:
            return
        self._has_warned = True
        held = dtype_name(self._shards[0].parameter.dtype)
        sent = dtype_name(self._dtype)
        logger.warning(
            "The engines compute in %s and the trainer in %s: of the weights that changed since the last push, "
            "%.1f %% are unchanged after the cast, so samples come from another policy than the one being trained. "
            "Use --sglang-dtype %s, or train in the engines' precision.",
            sent, held, 100 * loss.share, held,
        )  # fmt: skip


def _sampled(tensor: Tensor) -> Tensor:
    """Return a copy of at most ``SAMPLES_PER_TENSOR`` elements, evenly spread."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, -(-flat.numel() // SAMPLES_PER_TENSOR))].clone()
