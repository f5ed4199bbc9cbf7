"""Routing replay on one rank: later passes over a rollout reuse the experts that an earlier pass chose.

Two passes over the same tokens choose different experts once the weights have changed, or if the engine rounds
differently; a mixture of experts then compares log-probs of two different networks.  With ``--use-routing-replay`` the
pass that computes the old log-probs records each router's choices, and training replays them (arXiv:2507.18071,
section 5.3, there called Routing Replay).  With ``--use-rollout-routing-replay`` the old log-probs and training both
replay the engine's choices (R3, arXiv:2510.11370).  The probabilities at the chosen experts always come from the
current router, so it keeps learning.

The reference, the teacher and MTP layers choose freely.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from megatron.core import mpu
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.utils import get_model_config, unwrap_model

from slime.backends.megatron_utils.data import current_device, sum_over_ranks
from slime.backends.megatron_utils.layers.router import ChangedChoices, HostChoices, MicroBatchReplay, Router, Stage
from slime.train_data.device_batch import DeviceBatch
from slime.train_data.microbatch import PackingConfig, pack_thd
from slime.train_data.routed_experts import (
    RoutedShape,
    check_choices,
    pack_routed_experts,
    routed_rows,
    rows_needed,
)
from slime.utils.errors import ConfigError, DataError


class RoutingReplay:
    """Records and replays the expert choices of one rollout's micro-batches.

    Invariant: between rollouts nothing is kept, and the stage is "fallthrough".

    Args:
        from_engine: replay the engine's choices (``--use-rollout-routing-replay``).

    Raises:
        ConfigError: the model has routers that cannot replay.
    """

    def __init__(self, model: Sequence[torch.nn.Module], packing: PackingConfig, *, from_engine: bool) -> None:
        config = get_model_config(model[0])
        self._shape = RoutedShape(
            num_layers=config.num_layers, top_k=config.moe_router_topk, num_experts=config.num_moe_experts
        )
        self._splits, self._packing = config.sequence_parallel, packing
        self.must_record = not from_engine
        """A pass with the old policy must record choices before training."""
        self._layers = _number_routers(model)
        self._stage: Stage = "fallthrough"
        self._choices: list[HostChoices] = []
        self._num_told: list[list[int]] = []
        """Per micro-batch and sample, the number of tokens with choices from the engine; empty without them."""
        self._changed = ChangedChoices()

    def begin(self, data: DeviceBatch) -> None:
        """Start a rollout: drop the choices of the last one, and in R3 load the engine's choices.

        Raises:
            DataError: a sample's choices are missing or impossible; the message names the sample.
        """
        self.clear()
        rows_of_layer = {layer: row for row, layer in enumerate(self._layers)}
        self._choices = [HostChoices(rows_of_layer) for _ in data.micro_batch_indices]
        if not self.must_record:
            self._fill(data)

    def clear(self) -> None:
        self._choices, self._num_told = [], []
        self._changed.take()

    @contextmanager
    def during(self, passes: Literal["old_log_probs", "train"]) -> Iterator[None]:
        """Record or replay in the passes inside; outside of this context all routers choose freely."""
        self._stage = "record" if passes == "old_log_probs" and self.must_record else "replay"
        try:
            yield
        finally:
            self._stage = "fallthrough"

    def attach(self, packed_seq_params: Any, micro_batch: int, total_lengths: Sequence[int]) -> None:
        """Attach the routers' instructions to the packing of a micro-batch.

        Args:
            packed_seq_params: gets the attribute ``expert_replay``, see ``RouterInputs``.
        """
        if self._stage == "fallthrough":
            return
        told = self._num_told[micro_batch] if self._num_told else total_lengths
        marks = [(torch.arange(length) < count).long() for length, count in zip(total_lengths, told, strict=True)]
        is_told = pack_thd(marks, self._packing).tokens[0] > 0
        packed_seq_params.expert_replay = MicroBatchReplay(
            self._stage,
            self._choices[micro_batch],
            is_told.to(packed_seq_params.cu_seqlens_q.device, non_blocking=True),
            self._changed,
        )

    def take_metrics(self) -> dict[str, float]:
        """Return the share of replayed choices that the current router would make differently.

        One choice per token and layer, over the passes of all ranks since the last call.  Collective.
        """
        changed, compared = sum_over_ranks(self._changed.take().to(current_device())).tolist()
        return {"routing_replay_changed": changed / compared} if compared else {}

    def _fill(self, data: DeviceBatch) -> None:
        rows = self._checked_rows(data)
        for choices, indices in zip(self._choices, data.micro_batch_indices, strict=True):
            self._num_told.append([len(rows[index]) for index in indices])
            choices.ids = pack_routed_experts(
                [rows[index] for index in indices],
                [data.total_lengths[index] for index in indices],
                self._shape,
                self._packing,
                layers=[layer - 1 for layer in self._layers],
                tp_rank=mpu.get_tensor_model_parallel_rank() if self._splits else 0,
                tp_size=mpu.get_tensor_model_parallel_world_size() if self._splits else 1,
            )
            if torch.cuda.is_available():
                choices.ids = choices.ids.pin_memory()
            choices.written = set(self._layers)

    def _checked_rows(self, data: DeviceBatch) -> list[torch.Tensor]:
        column = data.rollout_routed_experts
        if column is None:
            raise DataError(
                "the train data have no rollout_routed_experts, which --use-rollout-routing-replay needs for every "
                "sample; the rollout function must ask the engine with return_routed_experts and hand its meta_info "
                "to Sample.append_response_tokens, and a custom converter must keep the field"
            )
        numbers = data.sample_indices or data.partition or range(len(column))
        checked = []
        for number, rows, mask, length in zip(numbers, column, data.loss_masks, data.total_lengths, strict=True):
            name = f"sample {number}"
            rows = routed_rows(rows, name, self._shape, total_length=length, num_needed=rows_needed(mask, length))
            on_device = rows.to(current_device(), non_blocking=True)  # millions of short rows to sort
            check_choices(on_device, name, self._shape, [layer - 1 for layer in self._layers])
            checked.append(rows)
        return checked


def _number_routers(model: Sequence[torch.nn.Module]) -> list[int]:
    """Set the layer number of every router except those of MTP layers; return the numbers, counted from 1, sorted."""
    layers: list[int] = []
    for chunk in model:
        for name, module in unwrap_model(chunk).named_modules():
            if not isinstance(module, TopKRouter) or "mtp" in name.split("."):
                continue
            if not isinstance(module, Router):
                raise ConfigError(
                    f"--use-routing-replay: the router {name} is a {type(module).__module__}.{type(module).__name__}; "
                    "experts are replayed by slime.backends.megatron_utils.layers.router.Router; build the layer with "
                    "slime.backends.megatron_utils.layers.layer_specs.RoutedExperts"
                )
            module.replayed_layer = int(module.layer_number)
            layers.append(module.replayed_layer)
    return sorted(layers)
