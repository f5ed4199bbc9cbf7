"""Experts of DeepSeek-V4: scores sqrt(softplus(x)), a clamped gate, and layers whose experts come from a table.

Shapes: T = tokens that this rank routes, E = experts, k = experts per token.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from slime.backends.megatron_utils import cpu_platform  # noqa: F401

# isort: split
import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from slime.backends.megatron_utils.layers.layer_specs import RoutedExperts
from slime.backends.megatron_utils.layers.router import Router, RouterInputs, part_of_tensor_rank


@dataclass(frozen=True, slots=True)
class TokenInputs(RouterInputs):
    """Inputs of a router that reads token ids."""

    token_ids: Tensor | None = None
    """[tokens of this context-parallel rank]"""


class SqrtSoftplusRouter(Router):
    """Chooses the top k by score plus bias; weights are their scores, normalized to sum to the scaling factor."""

    def routing(self, logits: Tensor, padding_mask: Any = None) -> tuple[Tensor, Tensor]:
        """Map logits [T, 1, E] to weights and choices, both [T, E]."""
        logits = self.apply_z_loss(logits.view(-1, logits.size(-1)))
        scores = F.softplus(logits).sqrt()
        if self.router_replay is None:
            _, ids = self.choose(scores, self.topk)
        else:
            _, ids = self.router_replay.get_replay_topk(scores, self.topk, default_compute_topk=self.choose)
        chosen = scores.gather(1, ids)
        weights = chosen / (chosen.sum(dim=-1, keepdim=True) + 1e-20) * self.config.moe_router_topk_scaling_factor
        # A table may name one expert twice.
        probabilities = torch.zeros_like(scores).scatter_add(1, ids, weights)
        routing_map = torch.zeros_like(scores, dtype=torch.bool).scatter(1, ids, True)
        self._apply_expert_bias(routing_map)
        return probabilities, routing_map

    def choose(self, scores: Tensor, topk: int, **_: Any) -> tuple[Tensor, Tensor]:
        """Return scores and ids [T, k] of the chosen experts; the signature is megatron-core's."""
        ids = (scores if self.expert_bias is None else scores + self.expert_bias).topk(topk, dim=1).indices
        return scores.gather(1, ids), ids


class TableRouter(SqrtSoftplusRouter):
    """Looks a token's experts up in a table; the scores are only weights."""

    table: Tensor
    """[vocabulary, k] int64; see :meth:`take_table`."""

    def __init__(self, config: TransformerConfig, pg_collection: ProcessGroupCollection | None = None) -> None:
        """Create the router without a bias."""
        own = copy.copy(config)
        own.moe_router_enable_expert_bias = False
        super().__init__(own, pg_collection)
        del self.expert_bias  # megatron-core updates the bias of every module with this attribute
        self.token_ids: Tensor | None = None

    def _apply(self, fn: Any, *args: Any, **kwargs: Any) -> torch.nn.Module:
        """Convert like any module: there is no bias to keep in fp32."""
        return torch.nn.Module._apply(self, fn, *args, **kwargs)

    def take_table(self, table: Tensor) -> None:
        """Set the table, a constant that the trainer does not save in its checkpoints."""
        self.register_buffer("table", table.long().to(self.weight.device), persistent=False)

    def take(self, inputs: RouterInputs) -> None:
        super().take(inputs)
        assert isinstance(inputs, TokenInputs)
        self.token_ids = inputs.token_ids

    def choose(self, scores: Tensor, topk: int, **_: Any) -> tuple[Tensor, Tensor]:
        assert self.token_ids is not None
        ids = self.table[part_of_tensor_rank(self.token_ids, len(scores))]
        return scores.gather(1, ids), ids


class BoundedExperts(RoutedExperts):
    """Routed experts and a shared expert, with clamped gate and up projections."""

    router_class = SqrtSoftplusRouter

    def __init__(self, config: TransformerConfig, *args: Any, **options: Any) -> None:
        """Build with megatron-core's arguments for experts."""
        own = copy.copy(config)
        own.bias_activation_fusion = False  # the fused SwiGLU does not clamp
        super().__init__(own, *args, **options)


class TableExperts(BoundedExperts):
    """:class:`BoundedExperts` chosen by a table."""

    router_class = TableRouter
