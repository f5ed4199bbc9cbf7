"""Compressed entries of attention, and the indexer that selects among them (transformers' ``deepseek_v4``).

An entry combines ``rate`` consecutive tokens of a sequence, counted from the sequence's first token:

    entry = rotate(norm(sum over its tokens of softmax(gate + position bias) * value))

Entries that an indexer selects overlap: they also combine the preceding ``rate`` tokens, through other columns of both
projections.  A query sees the entries whose tokens are all at or before its position.

Shapes: T = tokens of the whole stream, C = entries of all its sequences, t = rows of this rank, r = tokens of an
entry, m = series of an entry (2 where they overlap), d = width of an entry, h = hidden size, k = entries of a query.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slime.backends.megatron_utils import cpu_platform

# isort: split
import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from slime.backends.megatron_utils.layers.latent_attention import ReplicatedLinear
from slime.backends.megatron_utils.layers.norm import Norm
from slime.backends.megatron_utils.layers.rotary import (
    RotaryTables,
    apply_rotary,
    cumulative_lengths,
    kept_on,
    natural_order,
)
from slime_plugins.models.glm5.indexer import PackedStream, index_scores

Tables = Callable[[Tensor], RotaryTables]
"""Positions [n] -> cosines and sines [n, rope / 2]."""
_BLOCK_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 27}
"""Number of scores computed at a time, by device."""


@dataclass(frozen=True, slots=True)
class PackedEntries:
    """The entries of one micro-batch at one rate, on the host and on the device."""

    rate: int
    tokens: Tensor
    """[C, r] the tokens of each entry."""
    before: Tensor
    """[C] the preceding entry in the sequence; C for none."""
    positions: Tensor
    """[C] position of each entry's first token in its sequence."""
    first_T: Tensor
    """[T] the first entry of each token's sequence."""
    seen_T: Tensor
    """[T] number of entries that each token sees."""
    sequences: tuple[tuple[int, int, int, int], ...]
    """First token, end, first entry and entries of each sequence."""

    @classmethod
    def from_offsets(cls, cu_seqlens: Tensor, rate: int) -> PackedEntries:
        """Build them from cumulative lengths [S + 1]; synchronizes with the device once."""
        cu = cu_seqlens.cpu().long()
        counts = cu.diff() // rate
        first = counts.cumsum(0) - counts
        number = torch.arange(int(counts.sum())) - first.repeat_interleave(counts)
        begin = cu[:-1].repeat_interleave(counts) + number * rate
        position = torch.arange(int(cu[-1])) - cu[:-1].repeat_interleave(cu.diff())
        before = torch.where(number > 0, torch.arange(len(number)) - 1, len(number))
        tensors = (
            begin[:, None] + torch.arange(rate), before, number * rate, first.repeat_interleave(cu.diff()),
            (position + 1) // rate,
        )  # fmt: skip
        sequences = zip(cu[:-1].tolist(), cu[1:].tolist(), first.tolist(), counts.tolist(), strict=True)
        tokens, before, positions, first_T, seen_T = (x.to(cu_seqlens.device) for x in tensors)
        return cls(rate, tokens, before, positions, first_T, seen_T, tuple(sequences))

    @classmethod
    def of(cls, packed_seq_params: Any, rate: int) -> PackedEntries:
        """Return the entries of a micro-batch, built once and cached on its ``packed_seq_params``."""
        cu = cumulative_lengths(packed_seq_params)
        return kept_on(packed_seq_params, f"entries_of_{rate}", lambda: cls.from_offsets(cu, rate))

    def seen(self, tokens: Tensor, width: int | None = None) -> Tensor:
        """Return [t, k]: the entries that each of ``tokens`` [t] sees, starting with the first, at most ``width``; -1
        pads.
        """
        longest = max((count for *_, count in self.sequences), default=0)
        place = torch.arange(longest if width is None else min(width, longest), device=tokens.device)
        return torch.where(place < self.seen_T[tokens, None], self.first_T[tokens, None] + place, -1)


@dataclass(frozen=True, slots=True)
class OwnTokens:
    """The tokens of this context-parallel rank."""

    places: Tensor
    """[t] indices in the whole stream."""
    host_places: Tensor
    """[t] the same on the host."""
    positions: Tensor
    """[t] positions in their sequences."""
    order: Tensor | None
    """[T] index of each token in the ranks' gathered parts; None for a single rank."""
    group: Any
    """The context-parallel group."""

    @classmethod
    def of(cls, packed_seq_params: Any, group: Any) -> OwnTokens:
        """Return this rank's tokens of a micro-batch, built once and cached on its ``packed_seq_params``."""

        def make() -> OwnTokens:
            stream = PackedStream.of(packed_seq_params)
            order = natural_order(packed_seq_params, group.size()) if group.size() > 1 else None
            host = torch.arange(stream.num_tokens)
            if order is not None:
                host = order.cpu().argsort().chunk(group.size())[group.rank()]
            places = host.to(stream.start_T.device)
            return cls(places, host, places - stream.start_T[places], order, group)

        return kept_on(packed_seq_params, "own_tokens", make)

    def gathered(self, x: Tensor) -> Tensor:
        """Gather rows [t, ...] of this rank to those of all tokens [T, ...]; differentiable."""
        if self.order is None:
            return x
        return gather_from_sequence_parallel_region(x.contiguous(), group=self.group).index_select(0, self.order)


class Compressor(torch.nn.Module):
    """Computes entries [C, d], replicated on all tensor-parallel ranks."""

    def __init__(self, config: TransformerConfig, *, rate: int, width: int, overlaps: bool, tp_group: Any) -> None:
        """Create projections [m d, h], the position bias [r, m d] and the norm of an entry."""
        super().__init__()
        self.config, self.width, self.tp_group, self.overlaps = config, width, tp_group, overlaps
        columns = width * (1 + overlaps)
        self.wkv = ReplicatedLinear(config.hidden_size, columns, config=config)
        self.wgate = ReplicatedLinear(config.hidden_size, columns, config=config)
        self.ape = torch.nn.Parameter(torch.zeros(rate, columns, **cpu_platform.of_new_parameters(config)))
        self.norm = Norm(config, width, config.layernorm_epsilon)
        # After the tokens are gathered, all ranks compute the same, so each has the complete gradient of the norm.
        vars(self.norm.weight)["sequence_parallel"] = False

    def forward(self, hidden_states: Tensor, own: OwnTokens, entries: PackedEntries, tables: Tables) -> Tensor:
        """Map this rank's hidden states [s, 1, h] to the entries of all tokens [C, d]; each rank uses them for its
        heads.
        """
        value = self._tokens(self.wkv(hidden_states), own)[entries.tokens]
        gate = self._tokens(self.wgate(hidden_states), own)[entries.tokens] + self.ape
        if self.overlaps:
            value = self._with_tokens_before(value, entries, 0.0)
            gate = self._with_tokens_before(gate, entries, -torch.inf)
        weight = gate.softmax(dim=1, dtype=torch.promote_types(gate.dtype, torch.float32)).to(value.dtype)
        turned = turn_last(self.norm((value * weight).sum(dim=1)), tables(entries.positions))
        return copy_to_tensor_model_parallel_region(turned, group=self.tp_group)

    def _tokens(self, x: Tensor, own: OwnTokens) -> Tensor:
        if self.config.sequence_parallel:
            x = gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=False, group=self.tp_group)
        return own.gathered(x.squeeze(1))

    def _with_tokens_before(self, x: Tensor, entries: PackedEntries, missing: float) -> Tensor:
        """Map [C, r, 2 d] to [C, 2 r, d]: the first half of a token's columns belongs to the next entry."""
        early, own = x.split(self.width, dim=-1)
        early = F.pad(early, (0, 0, 0, 0, 0, 1), value=missing)[entries.before]
        return torch.cat([early, own], dim=1)


class EntryIndexer(torch.nn.Module):
    """Selects the entries that a query attends to, with a small attention over its own entries; not trained."""

    def __init__(
        self,
        config: TransformerConfig,
        *,
        query_rank: int,
        heads: int,
        width: int,
        topk: int,
        rate: int,
        tp_group: Any,
    ) -> None:
        """Create projections and the compressor of ``width``, untrained, because the selection has no gradient."""
        super().__init__()
        self.config, self.heads, self.width, self.topk, self.tp_group = config, heads, width, topk, tp_group
        self.wq_b = ReplicatedLinear(query_rank, heads * width, config=config)
        self.weights_proj = ReplicatedLinear(config.hidden_size, heads, config=config)
        self.compressor = Compressor(config, rate=rate, width=width, overlaps=True, tp_group=tp_group)
        self.requires_grad_(False)

    @torch.no_grad()
    def forward(
        self, hidden_states: Tensor, query_latent: Tensor, own: OwnTokens, entries: PackedEntries, tables: Tables
    ) -> Tensor:
        """Return [t, k] selected entries, -1 for none, for this rank's rows [s, 1, ...]."""
        key = self.compressor(hidden_states, own, entries, tables)
        count = hidden_states.size(0)
        first = self.tp_group.rank() * count if self.config.sequence_parallel else 0
        rows = slice(first, first + count)
        query = self.wq_b(query_latent.squeeze(1)).unflatten(-1, (self.heads, self.width))
        query = turn_last(query, tables(own.positions[rows]))
        weight = F.linear(hidden_states.squeeze(1).float(), self.weights_proj.weight.float())
        weight = weight * (self.heads * self.width) ** -0.5
        chosen = choose_entries(query, weight, key, entries, own.places[rows], own.host_places[rows], self.topk)
        if self.config.sequence_parallel:
            chosen = gather_from_sequence_parallel_region(chosen, group=self.tp_group)
        return chosen


def choose_entries(
    query: Tensor, weight: Tensor, key: Tensor, entries: PackedEntries, places: Tensor, host_places: Tensor, topk: int
) -> Tensor:
    """Select entries [t, k], -1 if a row sees fewer; a row that sees at most ``topk`` entries attends to all of them.

    Args:
        query: [t, heads, d]
        weight: [t, heads] fp32, including all scales.
        key: [C, d]
        places: [t] indices of the rows' tokens in the stream, on the device; ``host_places`` on the host.
    """
    chosen = entries.seen(places, topk)
    for begin, end, first_entry, count in entries.sequences:
        if count <= topk:
            continue
        # Starts with the first token that sees more entries than it may attend to.
        rows = (host_places >= begin + (topk + 1) * entries.rate - 1) & (host_places < end)
        block = max(_BLOCK_ELEMENTS[query.device.type] // max(count * query.shape[1], 1), 1)
        for some in rows.nonzero().flatten().split(block):
            local = some.to(query.device)
            scores = index_scores(query[local], weight[local], key[first_entry : first_entry + count])
            unseen = torch.arange(count, device=local.device) >= entries.seen_T[places[local], None]
            chosen[local] = first_entry + scores.masked_fill_(unseen, -torch.inf).topk(topk, dim=-1).indices
    return chosen


def turn_last(x: Tensor, tables: RotaryTables) -> Tensor:
    """Rotate the last dimensions [..., rope] of rows [n, ..., d] in interleaved pairs, each row by its angles."""
    width = 2 * tables.cos.size(-1)
    plain, turning = x.split([x.size(-1) - width, width], dim=-1)
    heads = turning.reshape(len(x), math.prod(x.shape[1:-1]), width)  # also works for no rows
    return torch.cat([plain, apply_rotary(heads, tables, interleaved=True).view_as(turning)], dim=-1)
