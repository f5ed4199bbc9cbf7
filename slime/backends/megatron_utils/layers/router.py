"""megatron-core's router with balancing losses per sample, which do not depend on packing, padding and parallelism.

Scores, choice of experts, groups, scaling and the bias are the parent's.  Only values that depend on more than one
token are computed here, and only in training passes with :class:`RoutedSamples`.  A pass may also prescribe the
experts (:class:`MicroBatchReplay`), through megatron-core's replay interface.

Shapes: T = tokens that this rank routes, S = samples of the micro-batch, E = experts, k = experts per token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from slime.train_data.microbatch import PackingConfig, pack_thd
from slime.train_data.routed_experts import EXPERT_ID_DTYPE
from slime.utils.errors import SlimeError


@dataclass(frozen=True, slots=True)
class RoutedSamples:
    """The samples of one micro-batch.  S = samples, T = tokens on this context-parallel rank, padding included.

    A plain mean over tokens would count padding, mix samples of a micro-batch, and weight a sample by how full its
    micro-batch is.  Instead each sample's balancing loss has the sample's weight in the policy loss, whatever the
    packing:

        default:                     sum over samples of (share of its rollout's trained tokens) / rollouts of the step
        --calculate-per-token-loss:  sum over samples of (its trained tokens) / trained tokens of the step
    """

    sample_of: Tensor
    """[T] int64: the sample of each token; S for padding."""
    lengths: Tensor
    """[S] float32: tokens of each sample, over all ranks."""
    weights: Tensor
    """[S] float32: factors that turn megatron-core's averages into the sums above."""

    def of_tensor_rank(self, num_tokens: int) -> Tensor:
        """Return the part of ``sample_of`` for the tokens that a router sees, [num_tokens]."""
        return part_of_tensor_rank(self.sample_of, num_tokens)


def part_of_tensor_rank(values_T: Tensor, num_tokens: int) -> Tensor:
    """Return the values [num_tokens] of the tokens that a router sees: all T, or under sequence parallelism those of
    this tensor-parallel rank.
    """
    if len(values_T) == num_tokens:
        return values_T
    return values_T.chunk(mpu.get_tensor_model_parallel_world_size())[mpu.get_tensor_model_parallel_rank()]


def routers_need_samples(config: TransformerConfig, *, logs_load: bool) -> bool:
    """Return True if the routers need more than single tokens: for balancing losses, a moving bias or the load."""
    if not config.num_moe_experts:
        return False
    aux = config.moe_aux_loss_coeff
    moves_bias = config.moe_router_enable_expert_bias and config.moe_router_bias_update_rate
    return bool(any(aux if isinstance(aux, list) else [aux]) or config.moe_z_loss_coeff or moves_bias or logs_load)


def attach_routed_samples(
    batch: Mapping[str, Any],
    packing: PackingConfig,
    num_microbatches: int,
    step_global_batch_size: int,
    *,
    per_token: bool,
) -> None:
    """Attach the samples of a micro-batch to its packing, for the routers.

    Args:
        batch: result of ``get_batch``; its ``packed_seq_params`` get the attribute ``routed_samples``.
    """
    lengths = batch["total_lengths"]
    device = batch["tokens"].device
    sample_of = pack_thd(
        [torch.full((length,), index, device=device) for index, length in enumerate(lengths)],
        packing,
        pad_id=len(lengths),
    ).tokens[0]
    trained = torch.stack([mask.sum() for mask in batch["loss_masks"]]).to(device, torch.float32)
    if per_token:
        # Gradients are summed over ranks and divided by the trained tokens, which each context-parallel rank counts in
        # full.
        weights = trained * mpu.get_context_parallel_world_size()
    else:
        # megatron-core averages over micro-batches and data-parallel ranks, but this must be a sum over rollouts.
        share = trained / batch["rollout_mask_sums"].to(device, torch.float32).clamp(min=1)
        weights = share * (num_microbatches * mpu.get_data_parallel_world_size() / step_global_batch_size)
    samples = RoutedSamples(sample_of, torch.tensor(lengths, dtype=torch.float32, device=device), weights)
    batch["packed_seq_params"].routed_samples = samples


@dataclass(frozen=True, slots=True)
class RouterInputs:
    """Inputs of the routers in one pass, besides the hidden states."""

    samples: RoutedSamples | None = None
    """For balancing losses and the bias."""
    replay: MicroBatchReplay | None = None
    """None lets every router choose freely."""

    @classmethod
    def of(cls, packed_seq_params: Any) -> RouterInputs:
        return cls(
            getattr(packed_seq_params, "routed_samples", None), getattr(packed_seq_params, "expert_replay", None)
        )


class Router(TopKRouter):
    """TopKRouter for packed samples.  The layer calls ``take`` before every pass."""

    expert_bias: Tensor | None
    router_replay: LayerReplay | None

    def __init__(self, config: TransformerConfig, pg_collection: ProcessGroupCollection | None = None) -> None:
        super().__init__(config, pg_collection)
        self.samples: RoutedSamples | None = None
        self.replayed_layer: int | None = None
        """Number of the layer whose choices are replayed here; None for routers without replay (MTP layers)."""
        self.counts_load = False
        self.load: Tensor | None = None
        """[E] tokens sent to each expert in training passes, if ``counts_load``; None before the first pass."""

    def take(self, inputs: RouterInputs) -> None:
        self.samples = inputs.samples
        self.router_replay = None
        if inputs.replay is not None and self.replayed_layer is not None:
            self.router_replay = LayerReplay(inputs.replay, self.replayed_layer)

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> torch.nn.Module:
        """Convert the module, as ``.bfloat16()`` and ``.to()`` do, but keep ``expert_bias`` in fp32.

        megatron-core restores its dtype only in the next forward pass, when values loaded from a checkpoint have
        already been rounded.
        """
        bias = self.expert_bias
        super()._apply(fn, *args, **kwargs)
        if bias is not None and self.expert_bias is not None and self.expert_bias.dtype != bias.dtype:
            self.expert_bias = bias.to(self.expert_bias.device)
        return self

    def apply_z_loss(self, logits: Tensor, padding_mask: Any = None) -> Tensor:
        """Return the logits [T, E], with the gradient of ``logsumexp(logits)^2`` added, averaged over each sample's
        tokens.
        """
        coefficient = self.config.moe_z_loss_coeff
        if self.samples is None or not coefficient or not self._is_training():
            return super().apply_z_loss(logits)
        squares = logits.float().logsumexp(-1).square()
        return MoEAuxLossAutoScaler.apply(logits, coefficient * (squares * self._token_weights(len(logits))).sum())

    def _apply_aux_loss(
        self, probs: Tensor, scores_for_aux_loss: Tensor, routing_map: Tensor, with_padding_mask: bool = False
    ) -> Tensor:
        """Balance within the micro-batch: ``E * sum_e f_e P_e`` over its tokens, weighted by all its samples.

        By definition this loss depends on which samples share a micro-batch; ``seq_aux_loss`` does not.
        """
        if self.samples is None:
            return super()._apply_aux_loss(probs, scores_for_aux_loss, routing_map, with_padding_mask)
        is_real = self.samples.of_tensor_rank(len(probs)) < len(self.samples.lengths)
        return self._attach(probs, "aux_loss", scores_for_aux_loss, routing_map, 1 - is_real.long())

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
        return self._attach(probs, "seq_aux_loss", scores_for_aux_loss, routing_map, sample_of)

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Any = None) -> None:
        """Count the tokens of each expert, without padding, for the step's bias update and ``counts_load``."""
        if (self.enable_expert_bias or self.counts_load) and self._is_training():
            with torch.no_grad():
                if self.samples is not None:
                    is_real = self.samples.of_tensor_rank(len(routing_map)) < len(self.samples.lengths)
                    routing_map = routing_map & is_real[:, None]
                counts = routing_map.sum(dim=0)
                if self.enable_expert_bias:
                    self.local_tokens_per_expert += counts
                if self.counts_load:
                    self.load = counts if self.load is None else self.load + counts

    def _is_training(self) -> bool:
        """Return False in log-prob passes, and in the first forward pass of a recomputed layer."""
        return self.training and torch.is_grad_enabled()

    def _token_weights(self, num_tokens: int) -> Tensor:
        """Return [T] weights of the tokens: the sample's weight divided by the sample's length; 0 for padding."""
        assert self.samples is not None
        per_sample = self.samples.weights / self.samples.lengths
        return torch.cat([per_sample, per_sample.new_zeros(1)])[self.samples.of_tensor_rank(num_tokens)]

    def _attach(self, probs: Tensor, kind: str, scores: Tensor, routing_map: Tensor, group_of: Tensor) -> Tensor:
        """Return ``probs``, with the gradient of this rank's part of a balancing loss added.

        Args:
            kind: name of the loss, which selects its coefficient.
            scores: [T, E] with gradient; positive, each row sums to one.
            routing_map: [T, E] True where these scores chose an expert.
            group_of: [T] the group of tokens within which the load is balanced: 0 (the micro-batch) for ``aux_loss``,
                the sample for ``seq_aux_loss``; the number of groups for padding.
        """
        coefficient = self.get_aux_loss_coeff(kind)
        if not coefficient:
            return probs
        assert self.samples is not None
        lengths, weights = self.samples.lengths, self.samples.weights
        if kind == "aux_loss":
            lengths, weights = lengths.sum()[None], weights.sum()[None]
        shape = (len(lengths) + 1, scores.size(1))
        chosen = torch.zeros(shape, device=scores.device).index_add_(0, group_of, routing_map.float())
        dist.all_reduce(chosen, group=self.tp_cp_group)
        score_sums = torch.zeros(shape, device=scores.device).index_add(0, group_of, scores.float())
        scale = coefficient * weights * self.config.num_moe_experts / (self.topk * lengths.square())
        loss = (scale * (chosen * score_sums)[:-1].sum(-1)).sum()
        return MoEAuxLossAutoScaler.apply(probs, loss)


# Replay: one pass over a micro-batch records the experts of each layer, and later passes choose them again.
#
# In place of its top-k, megatron-core calls an object ``router_replay``; here this is :class:`LayerReplay`.  It
# belongs to a micro-batch and is attached to its packing (``packed_seq_params``), so no pass need be counted: with
# several micro-batches in the pipeline, and when a layer is recomputed for its backward pass, the router always finds
# the ids of the tokens that it sees.
#
# Shapes: T = tokens that a router sees (of this context-parallel rank, and under sequence parallelism of this tensor
# rank), k = experts per token, E = experts, N = layers with experts on this rank.


Stage = Literal["fallthrough", "record", "replay"]
"""Routers choose freely; choose freely and record the choice; choose the recorded experts."""

TopK = Callable[..., tuple[Tensor, Tensor]]
"""megatron-core's top-k: (scores, k, num_groups=, group_topk=) -> scores and ids of the chosen experts."""


@dataclass(slots=True)
class HostChoices:
    """The chosen expert ids of one micro-batch, on the host; pinned if there are GPUs."""

    rows: Mapping[int, int]
    """Layer number -> row of ``ids``."""
    ids: Tensor | None = None
    """[N, T, k] of EXPERT_ID_DTYPE; allocated when the first layer is recorded."""
    written: set[int] = field(default_factory=set)
    """Layers that have been recorded."""

    def write(self, layer: int, ids_Tk: Tensor) -> None:
        """Record a router's choice."""
        if self.ids is None or self.ids.shape[1:] != ids_Tk.shape:
            self.ids = torch.empty(
                (len(self.rows), *ids_Tk.shape), dtype=EXPERT_ID_DTYPE, pin_memory=torch.cuda.is_available()
            )
            self.written = set()
        # Converted on the device: a copy between devices that also changes the dtype goes through pageable memory.
        self.ids[self.rows[layer]].copy_(ids_Tk.to(EXPERT_ID_DTYPE), non_blocking=True)
        self.written.add(layer)

    def read(self, layer: int, device: torch.device) -> Tensor:
        """Return the recorded ids of a layer, int64 [T, k].

        Raises:
            SlimeError: this layer's router did not run in the recording pass.
        """
        if self.ids is None or layer not in self.written:
            raise SlimeError(
                f"--use-routing-replay: layer {layer} has no recorded choice of experts for this micro-batch; the "
                "pass that records, for the log-probs of the old policy, did not run through its router"
            )
        return self.ids[self.rows[layer]].to(device, non_blocking=True).long()


@dataclass(slots=True)
class ChangedChoices:
    """Counts the recorded choices that the current router would make differently."""

    counts: Tensor | None = None
    """int64 [2] on the device: changed choices, and compared choices; None before the first."""

    @torch.no_grad()
    def add(self, replayed_Tk: Tensor, present_Tk: Tensor, is_told_T: Tensor, num_experts: int) -> None:
        """Count the tokens with a recorded choice, and those that would now get another set of experts."""
        chosen = torch.zeros(len(replayed_Tk), num_experts, dtype=torch.bool, device=replayed_Tk.device)
        chosen.scatter_(1, replayed_Tk, True)
        is_changed_T = ~chosen.gather(1, present_Tk).all(dim=1) & is_told_T
        counts = torch.stack([is_changed_T.sum(), is_told_T.sum()])
        self.counts = counts if self.counts is None else self.counts + counts

    def take(self) -> Tensor:
        """Return ``counts``, or zeros if nothing was compared, and reset them."""
        counts, self.counts = self.counts, None
        return torch.zeros(2, dtype=torch.int64) if counts is None else counts


@dataclass(frozen=True, slots=True)
class MicroBatchReplay:
    """The choices of all routers in one pass over a micro-batch, recorded or replayed."""

    stage: Stage
    choices: HostChoices
    is_told_T: Tensor
    """[T on this context-parallel rank] bool: tokens with a recorded choice; False for padding."""
    changed: ChangedChoices


@dataclass(frozen=True, slots=True)
class LayerReplay:
    """Replays one router in one pass; replaces megatron-core's ``RouterReplay``."""

    of: MicroBatchReplay
    layer: int
    """Number in the whole model, counted from 1."""

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: TopK | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return scores [T, k] and ids [T, k] of the chosen experts; the scores are current and carry a gradient."""
        assert default_compute_topk is not None
        if self.of.stage == "record":
            values, ids = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
            self.of.choices.write(self.layer, ids)
            return values, ids
        ids = self.of.choices.read(self.layer, scores.device)
        if ids.shape != (len(scores), topk):
            raise SlimeError(
                f"--use-routing-replay: layer {self.layer} routes {len(scores)} tokens to {topk} experts each, and "
                f"the recorded choice has shape {list(ids.shape)}; the passes over this micro-batch are not packed "
                "alike"
            )
        if torch.is_grad_enabled():  # once per micro-batch: the first pass of a recomputed layer has no gradients
            with torch.no_grad():
                _, present = default_compute_topk(scores.detach(), topk, num_groups=num_groups, group_topk=group_topk)
            is_told_T = part_of_tensor_rank(self.of.is_told_T, len(scores))
            self.of.changed.add(ids, present, is_told_T, scores.size(1))
        return scores.gather(1, ids), ids
