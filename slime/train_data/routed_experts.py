"""Checks the experts chosen at each position, and packs them like the tokens of a micro-batch.

An engine reports the experts of every input position, so a sample has a row for each token except the last.  Rows may
end earlier if nothing after them is trained, for example tool output at the very end.

Shapes: L = tokens of one sequence, P = rows of its routing (at most L - 1), N = layers, k = experts per token,
T = tokens of the micro-batch on this rank, including padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slime.train_data.microbatch import PackingConfig, pack_thd
from slime.utils.errors import DataError

EXPERT_ID_DTYPE = torch.int16
"""Dtype of expert ids: half the size of the engine's ids, and large enough for any model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutedShape:
    """Shape of a model's expert choices."""

    num_layers: int
    """N: layers of the whole model including dense ones; an engine reports all of them."""
    top_k: int
    num_experts: int

    def __post_init__(self) -> None:
        if self.num_experts > torch.iinfo(EXPERT_ID_DTYPE).max:
            raise DataError(
                f"--num-experts is {self.num_experts}; expert ids are kept in {EXPERT_ID_DTYPE}, which ends at "
                f"{torch.iinfo(EXPERT_ID_DTYPE).max}; run without --use-routing-replay"
            )


def rows_needed(loss_mask: Sequence[int] | Tensor, total_length: int) -> int:
    """Return the number of rows that a sample's trained tokens depend on: one per token before the last trained token.

    Args:
        loss_mask: [R] loss mask of the response, which ends the sequence.
        total_length: L.
    """
    trained = torch.as_tensor(loss_mask).nonzero()
    return 0 if len(trained) == 0 else total_length - len(loss_mask) + int(trained[-1])


def routed_rows(rows: Any, name: str, shape: RoutedShape, *, total_length: int, num_needed: int) -> Tensor:
    """Check a sample's routing and return it as a tensor [P, N, k] of :data:`EXPERT_ID_DTYPE`.

    Args:
        rows: Rows from the engine; None means no rows.
        name: Name of the sample, for messages.
        shape: Shape of the model's choices.
        total_length: L of the sample.
        num_needed: See :func:`rows_needed`.

    Raises:
        DataError: rows are missing, have another shape, or hold ids out of range; names the sample and the flag.  The
            range of rows that already have :data:`EXPERT_ID_DTYPE` is left to :func:`check_choices`.
    """
    if rows is None:
        rows = torch.zeros(0, shape.num_layers, shape.top_k, dtype=EXPERT_ID_DTYPE)
    rows = torch.as_tensor(rows)
    if rows.dim() != 3 or rows.shape[1:] != (shape.num_layers, shape.top_k):
        raise DataError(
            f"rollout_routed_experts of {name} has shape {list(rows.shape)}; --use-rollout-routing-replay needs "
            f"[tokens - 1, {shape.num_layers} layers, {shape.top_k} experts of a token], as --num-layers and "
            "--moe-router-topk say; engine and trainer must run the same model"
        )
    if not num_needed <= len(rows) < total_length:
        raise DataError(
            f"{name} has {len(rows)} rows of rollout_routed_experts for {total_length} tokens, of which the trained "
            f"ones depend on {num_needed}; --use-rollout-routing-replay needs a row for each token but the last. Ask "
            "the engine with return_routed_experts, and hand its meta_info to Sample.append_response_tokens"
        )
    if rows.dtype != EXPERT_ID_DTYPE:
        _check_range(rows, name, shape)
        rows = rows.to(EXPERT_ID_DTYPE)
    return rows


def check_choices(rows: Tensor, name: str, shape: RoutedShape, moe_layers: Sequence[int]) -> None:
    """Check that every row of a layer with experts has k different valid expert ids.

    An engine sends zeros for layers that it did not record, and -1 for unused slots.

    Args:
        rows: [P, N, k].
        name: Name of the sample, for messages.
        shape: Shape of the model's choices.
        moe_layers: Indices (from 0) of the layers with experts.

    Raises:
        DataError: names the sample, the position, the layer and the flag.
    """
    chosen = rows[:, list(moe_layers)]
    if not chosen.numel():
        return
    _check_range(chosen, name, shape)
    ordered = chosen.sort(dim=-1).values
    is_double = (ordered[..., 1:] == ordered[..., :-1]).any(dim=-1)
    if is_double.any():
        position, layer = is_double.nonzero()[0].tolist()
        raise DataError(
            f"rollout_routed_experts of {name} names an expert twice at position {position}, layer "
            f"{moe_layers[layer]}: {chosen[position, layer].tolist()}; --use-rollout-routing-replay needs "
            f"{shape.top_k} different ones. Zeros mean that the engine records no routing of this layer"
        )


def _check_range(rows: Tensor, name: str, shape: RoutedShape) -> None:
    is_wrong = (rows < 0) | (rows >= shape.num_experts)
    if is_wrong.any():
        position, layer, _ = is_wrong.nonzero()[0].tolist()
        raise DataError(
            f"rollout_routed_experts of {name} has expert {int(rows[is_wrong][0])} at position {position} (layer "
            f"number {layer} of those looked at); --use-rollout-routing-replay needs ids from 0 to "
            f"{shape.num_experts - 1}, as --num-experts says"
        )


def spread_experts(slots: Tensor, shape: RoutedShape) -> Tensor:
    """Return experts [n, k] for [n] slots, different within a row and evenly loaded over the rows.

    For slots without recorded routing: padding, the last token of each sequence, and tokens after its last row.
    """
    first = slots[:, None] * shape.top_k + torch.arange(shape.top_k, device=slots.device)
    return (first % shape.num_experts).to(EXPERT_ID_DTYPE)


def pack_routed_experts(
    rows: Sequence[Tensor],
    total_lengths: Sequence[int],
    shape: RoutedShape,
    packing: PackingConfig,
    *,
    layers: Sequence[int],
    tp_rank: int = 0,
    tp_size: int = 1,
) -> Tensor:
    """Return the routing of a packed micro-batch for this rank's routers, [layers, T / tp_size, k].

    Args:
        rows: [P, N, k] of each sequence.
        total_lengths: L of each sequence.
        shape: Shape of the model's choices.
        packing: Packing of the tokens; see ``pack_thd``.
        layers: Indices (from 0) of this rank's layers with experts.
        tp_rank: Index of this rank's shard of the tokens, under sequence parallelism.
        tp_size: Number of shards under sequence parallelism; 1 without it.
    """
    # Pack indices into the concatenated rows like token ids; -1 marks a slot without routing.
    sources, start = [], 0
    for known, length in zip(rows, total_lengths, strict=True):
        source = torch.full((length,), -1)
        source[: len(known)] = torch.arange(start, start + len(known))
        sources.append(source)
        start += len(known)
    source_T = pack_thd(sources, packing, pad_id=-1).tokens[0].chunk(tp_size)[tp_rank]
    result = spread_experts(torch.arange(len(source_T)), shape).repeat(len(layers), 1, 1)
    slots = (source_T >= 0).nonzero()[:, 0]
    if len(slots):
        known = torch.cat([sample[:, list(layers)] for sample in rows])
        result[:, slots] = known[source_T[slots]].transpose(0, 1)
    return result
