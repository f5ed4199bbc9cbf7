"""The experts of one micro-batch, layer by layer: written down by one pass over it, chosen again by later passes.

megatron-core's choice of experts asks an object ``router_replay`` where it would take the best; :class:`LayerReplay`
is that object.  It belongs to a micro-batch and travels with its packing (``packed_seq_params``), so that nobody has
to count passes: with several micro-batches in the pipeline, and when a layer is recomputed for its backward pass, the
router meets the ids of the very tokens that it sees.

Shapes: T = tokens that a router sees (of this context-parallel rank, and under sequence parallelism of this tensor
rank), k = experts of a token, E = experts, N = layers with experts on this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from slime.backends.megatron_utils.layers.routed_samples import part_of_tensor_rank
from slime.train_data.routed_experts import EXPERT_ID_DTYPE
from slime.utils.errors import SlimeError

Stage = Literal["fallthrough", "record", "replay"]
"""Routers choose freely; they choose freely and it is written down; they choose what is written down."""

TopK = Callable[..., tuple[Tensor, Tensor]]
"""megatron-core's choice: (scores, k, num_groups=, group_topk=) to the scores and the ids of the chosen."""


@dataclass(slots=True)
class HostChoices:
    """The ids of one micro-batch on the host, pinned where there is a GPU to copy from and to."""

    rows: Mapping[int, int]
    """Number of a layer -> its row."""
    ids: Tensor | None = None
    """[N, T, k] of EXPERT_ID_DTYPE; made when the first layer is written down."""
    written: set[int] = field(default_factory=set)
    """Layers that have been."""

    def write(self, layer: int, ids_Tk: Tensor) -> None:
        """Keep what a router has chosen."""
        if self.ids is None or self.ids.shape[1:] != ids_Tk.shape:
            self.ids = torch.empty(
                (len(self.rows), *ids_Tk.shape), dtype=EXPERT_ID_DTYPE, pin_memory=torch.cuda.is_available()
            )
            self.written = set()
        # Narrowed on the device: a copy between devices that changes the dtype as well goes through pageable memory.
        self.ids[self.rows[layer]].copy_(ids_Tk.to(EXPERT_ID_DTYPE), non_blocking=True)
        self.written.add(layer)

    def read(self, layer: int, device: torch.device) -> Tensor:
        """[T, k] int64 of a layer.

        Raises:
            SlimeError: this layer's router was not asked when the choices were written down.
        """
        if self.ids is None or layer not in self.written:
            raise SlimeError(
                f"--use-routing-replay: layer {layer} has no recorded choice of experts for this micro-batch; the "
                "pass that records, that of the log-probs of the old policy, did not run through its router"
            )
        return self.ids[self.rows[layer]].to(device, non_blocking=True).long()


@dataclass(slots=True)
class ChangedChoices:
    """How often a router would have chosen others than those it was told, over the tokens of a step."""

    counts: dict[torch.device, Tensor] = field(default_factory=dict)

    @torch.no_grad()
    def add(self, replayed_Tk: Tensor, present_Tk: Tensor, is_told_T: Tensor, num_experts: int) -> None:
        """Compare two choices as sets, where there was one."""
        chosen = torch.zeros(len(replayed_Tk), num_experts, dtype=torch.bool, device=replayed_Tk.device)
        chosen.scatter_(1, replayed_Tk, True)
        is_changed_T = ~chosen.gather(1, present_Tk).all(dim=1) & is_told_T
        counts = torch.stack([is_changed_T.sum(), is_told_T.sum()])
        known = self.counts.get(counts.device)
        self.counts[counts.device] = counts if known is None else known + counts

    def take(self) -> Tensor:
        """[changed, compared] since the last call, int64 on the host."""
        total = torch.zeros(2, dtype=torch.int64)
        for counts in self.counts.values():
            total += counts.cpu()
        self.counts.clear()
        return total


@dataclass(frozen=True, slots=True)
class MicroBatchReplay:
    """What the routers of one pass over a micro-batch do: write their choice down, or choose what is written."""

    stage: Stage
    choices: HostChoices
    is_told_T: Tensor
    """[T on this context-parallel rank] bool: tokens whose choice was a router's; not padding."""
    changed: ChangedChoices

    def of_layer(self, layer: int) -> LayerReplay:
        """For the router of a layer, by its number in the whole model, counted from 1."""
        return LayerReplay(self, layer)


@dataclass(frozen=True, slots=True)
class LayerReplay:
    """One router in one pass; see megatron-core's ``RouterReplay``, whose place it takes."""

    of: MicroBatchReplay
    layer: int

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: TopK | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Scores [T, k] and ids [T, k] of the experts chosen; the scores are the present ones and carry a gradient.

        Args:
            scores: [T, E] by which experts are ranked.
            topk: k.
            num_groups: of experts.
            group_topk: how many groups a token may use.
            default_compute_topk: the choice without replay.
        """
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
        if torch.is_grad_enabled():  # once for each micro-batch: a layer that is recomputed first runs without
            with torch.no_grad():
                _, present = default_compute_topk(scores.detach(), topk, num_groups=num_groups, group_topk=group_topk)
            is_told_T = part_of_tensor_rank(self.of.is_told_T, len(scores))
            self.of.changed.add(ids, present, is_told_T, scores.size(1))
        return scores.gather(1, ids), ids
