"""megatron-core's router with balancing losses per sample: packing, padding and parallelism do not change them.

Scores, choice of experts, groups, scaling and the bias are the parent's.  Only what looks at more than one token is
done here, and only in training passes that were given :class:`RoutedSamples`.  A pass may also be given experts to
choose (``expert_replay``), which the parent asks for in its own way.

Shapes: T = tokens that this rank routes, S = samples of the micro-batch, E = experts, k = experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slime.backends.megatron_utils import cpu_platform  # noqa: F401

# isort: split
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig

from slime.backends.megatron_utils.layers.expert_replay import LayerReplay, MicroBatchReplay
from slime.backends.megatron_utils.layers.routed_samples import RoutedSamples


@dataclass(frozen=True, slots=True)
class RouterInputs:
    """What the routers of one pass know beside hidden states."""

    samples: RoutedSamples | None = None
    """For balancing losses and the bias."""
    replay: MicroBatchReplay | None = None
    """None: every router chooses freely."""

    @classmethod
    def of(cls, packed_seq_params: Any) -> RouterInputs:
        """What was attached to the packing of a micro-batch."""
        return cls(
            getattr(packed_seq_params, "routed_samples", None), getattr(packed_seq_params, "expert_replay", None)
        )


class Router(TopKRouter):
    """TopKRouter for packed samples.  The layer calls ``take`` in front of every pass."""

    expert_bias: Tensor | None
    router_replay: LayerReplay | None

    def __init__(self, config: TransformerConfig, pg_collection: ProcessGroupCollection | None = None) -> None:
        super().__init__(config, pg_collection)
        self.samples: RoutedSamples | None = None
        self.replayed_layer: int | None = None
        """The layer whose choices are replayed here; None leaves the router out of it (MTP layers)."""

    def take(self, inputs: RouterInputs) -> None:
        """What holds for the next pass."""
        self.samples = inputs.samples
        self.router_replay = None
        if inputs.replay is not None and self.replayed_layer is not None:
            self.router_replay = inputs.replay.of_layer(self.replayed_layer)

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> torch.nn.Module:
        """What ``.bfloat16()``, ``.to()`` and their like call: ``expert_bias`` stays fp32 whatever the model's dtype.

        megatron-core restores its dtype at the next forward pass only, when a checkpoint that was loaded into the
        buffer has been rounded already.
        """
        bias = self.expert_bias
        super()._apply(fn, *args, **kwargs)
        if bias is not None and self.expert_bias is not None and self.expert_bias.dtype != bias.dtype:
            self.expert_bias = bias.to(self.expert_bias.device)
        return self

    def apply_z_loss(self, logits: Tensor, padding_mask: Any = None) -> Tensor:
        """Logits [T, E] that carry the gradient of ``logsumexp(logits)^2``, averaged over each sample's tokens."""
        coefficient = self.config.moe_z_loss_coeff
        if self.samples is None or not coefficient or not self._is_training():
            return super().apply_z_loss(logits)
        squares = logits.float().logsumexp(-1).square()
        return MoEAuxLossAutoScaler.apply(logits, coefficient * (squares * self._token_weights(len(logits))).sum())

    def _apply_aux_loss(
        self, probs: Tensor, scores_for_aux_loss: Tensor, routing_map: Tensor, with_padding_mask: bool = False
    ) -> Tensor:
        """Balance within the micro-batch: ``E * sum_e f_e P_e`` over its real tokens, weighing as all its samples do.

        By its definition this loss depends on which samples share a micro-batch; ``seq_aux_loss`` does not.
        """
        if self.samples is None:
            return super()._apply_aux_loss(probs, scores_for_aux_loss, routing_map, with_padding_mask)
        is_real = self.samples.of_tensor_rank(len(probs)) < len(self.samples.lengths)
        return self._attach(probs, "aux_loss", scores_for_aux_loss, routing_map, 1 - is_real.long(), 1)

    def _apply_seq_aux_loss(
        self,
        probs: Tensor,
        scores_for_aux_loss: Tensor,
        routing_map: Tensor,
        seq_length: int,
        bsz: int,
        with_padding_mask: bool = False,
    ) -> Tensor:
        """Balance within each sample: ``E * sum_e f_e P_e`` over its tokens."""
        if self.samples is None:
            return super()._apply_seq_aux_loss(
                probs, scores_for_aux_loss, routing_map, seq_length, bsz, with_padding_mask
            )
        sample_of = self.samples.of_tensor_rank(len(probs))
        return self._attach(
            probs, "seq_aux_loss", scores_for_aux_loss, routing_map, sample_of, len(self.samples.lengths)
        )

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Any = None) -> None:
        """Count the tokens of every expert, once per token and without padding, for the bias update of the step."""
        if self.enable_expert_bias and self._is_training():
            with torch.no_grad():
                if self.samples is not None:
                    is_real = self.samples.of_tensor_rank(len(routing_map)) < len(self.samples.lengths)
                    routing_map = routing_map & is_real[:, None]
                self.local_tokens_per_expert += routing_map.sum(dim=0)

    def _is_training(self) -> bool:
        """False in log-prob passes, and in the first pass over a layer that is recomputed."""
        return self.training and torch.is_grad_enabled()

    def _token_weights(self, num_tokens: int) -> Tensor:
        """[T]: what a token weighs, its sample's weight over its sample's length; 0 for padding."""
        assert self.samples is not None
        per_sample = self.samples.weights / self.samples.lengths
        return torch.cat([per_sample, per_sample.new_zeros(1)])[self.samples.of_tensor_rank(num_tokens)]

    def _attach(
        self, probs: Tensor, kind: str, scores: Tensor, routing_map: Tensor, group_of: Tensor, num_groups: int
    ) -> Tensor:
        """``probs`` that carry the gradient of this rank's part of a balancing loss.

        Args:
            probs: [T, E], returned as they are.
            kind: which loss, for its coefficient.
            scores: [T, E] with gradient, positive, summing to one.
            routing_map: [T, E] true where an expert was chosen by these scores.
            group_of: [T] the group of tokens within which the load is balanced; ``num_groups`` for padding.
            num_groups: the micro-batch (1) or its samples (S).
        """
        coefficient = self.get_aux_loss_coeff(kind)
        if not coefficient:
            return probs
        assert self.samples is not None
        lengths, weights = self.samples.lengths, self.samples.weights
        if num_groups == 1 and kind == "aux_loss":
            lengths, weights = lengths.sum()[None], weights.sum()[None]
        shape = (num_groups + 1, scores.size(1))
        chosen = torch.zeros(shape, device=scores.device).index_add_(0, group_of, routing_map.float())
        dist.all_reduce(chosen, group=self.tp_cp_group)
        score_sums = torch.zeros(shape, device=scores.device).index_add(0, group_of, scores.float())
        scale = coefficient * weights * self.config.num_moe_experts / (self.topk * lengths.square())
        loss = (scale * (chosen * score_sums)[:-1].sum(-1)).sum()
        return MoEAuxLossAutoScaler.apply(probs, loss)
