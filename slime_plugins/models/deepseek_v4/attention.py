"""Attention of DeepSeek-V4: one key head, whose keys are also the values, over a window and compressed entries.

    out[i] = sum over j of p[i, j] key[j],  j in the window of i and the entries that i attends to, one sink per head

Queries, keys and entries are rotated by their positions.  The values are rotated with the keys, so the output is
rotated back by the query's position.  Groups of heads are projected separately, then together.

Shapes: s = tokens of this tensor-parallel rank under sequence parallelism, else t; t = tokens; n = heads of this
rank, g = groups of them; d = width of a head; C = compressed entries; k = keys of a query.
"""

from __future__ import annotations

from typing import Any

from slime.backends.megatron_utils import cpu_platform  # noqa: F401

# isort: split
import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from slime.backends.megatron_utils.layers.attention import PackedAttention
from slime.backends.megatron_utils.layers.latent_attention import ReplicatedLinear
from slime.backends.megatron_utils.layers.norm import Norm
from slime.backends.megatron_utils.layers.rotary import LatentRotary, RotaryTables, kept_on
from slime_plugins.models.deepseek_v4.compression import (
    Compressor,
    EntryIndexer,
    OwnTokens,
    PackedEntries,
    turn_last,
)
from slime_plugins.models.deepseek_v4.family import V4Layers
from slime_plugins.models.glm5.attention import LatentUpProjection
from slime_plugins.models.glm5.indexer import PackedStream
from slime_plugins.models.glm5.sparse_attention import sparse_attention

SINK_COLUMNS = 16
"""Extra dimensions that encode a head's sink as an ordinary key; as many as keep rows aligned."""


def rotary_of(settings: Any, width: int) -> LatentRotary:
    """Return rotary angles of magnitude 1 from an entry of ``rope_parameters``, for ``width`` dimensions of a head."""
    if settings.get("rope_type", "default") == "default":
        return LatentRotary(width=width, base=settings["rope_theta"])
    return LatentRotary(
        width=width,
        base=settings["rope_theta"],
        factor=settings["factor"],
        original_length=settings["original_max_position_embeddings"],
        beta_fast=settings.get("beta_fast") or 32.0,
        beta_slow=settings.get("beta_slow") or 1.0,
        mscale_all_dim=1.0,
    )


class KeyValueAttention(PackedAttention):
    """Softmax with sinks over selected rows of ``keys``, which are also the values."""

    def forward(self, query: Tensor, keys: Tensor, indices: Tensor) -> Tensor:  # type: ignore[override]
        """Map queries [t, n, d], keys [K, d] and indices [t, k], -1 for none, to [t, n, d].

        The sink is one more key, with zeros as its value and ones in two extra columns.  In these columns the queries
        of a head have the sink's rounded logit and the rounding error.
        """
        assert self.softmax_offset is not None
        width = query.size(-1)
        logit = self.softmax_offset.to(torch.promote_types(query.dtype, torch.float32)) / self.scale
        rounded = logit.to(query.dtype)
        columns = torch.stack([rounded, (logit - rounded).detach().to(query.dtype)], dim=-1)
        columns = F.pad(columns, (0, SINK_COLUMNS - 2)).expand(len(query), -1, -1)
        sink = F.pad(keys.new_ones(1, 2), (width, SINK_COLUMNS - 2))
        every = torch.cat([F.pad(keys, (0, SINK_COLUMNS)), sink])
        indices = F.pad(indices, (1, 0), value=len(keys))
        return sparse_attention(torch.cat([query, columns], dim=-1), every, indices, scale=self.scale, value_dim=width)


class CompressedAttention(MegatronModule):
    """Self-attention of one layer.

    Tensor parallelism shards heads and groups; keys and entries are replicated, and their gradients summed.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        *,
        layers: V4Layers,
    ) -> None:
        """Build with megatron-core's arguments for attention, and the settings of the layers from config.json."""
        super().__init__(config=config)
        assert pg_collection is not None
        self.layers, self.layer_number = layers, layer_number
        self.tp_group, self.cp_group = pg_collection.tp, pg_collection.cp
        self.rate, width = layers.rate(layer_number), layers.head_dim
        settings = layers.entry_rotary if self.rate else layers.window_rotary
        self.rotary = rotary_of(settings, layers.rope_dim)
        self.num_groups = layers.out_groups // self.tp_group.size()
        columns = {
            "config": config, "init_method": config.init_method, "gather_output": False, "bias": False,
            "skip_bias_add": False, "is_expert": False, "tp_group": self.tp_group,
        }  # fmt: skip
        hidden, all_heads = config.hidden_size, config.num_attention_heads * width
        self.linear_q_down_proj = ReplicatedLinear(hidden, layers.query_rank, config=config)
        self.q_layernorm = Norm(config, layers.query_rank, config.layernorm_epsilon)
        self.linear_q_up_proj = ColumnParallelLinear(layers.query_rank, all_heads, **columns)
        self.linear_kv_proj = ReplicatedLinear(hidden, width, config=config)
        self.kv_layernorm = Norm(config, width, config.layernorm_epsilon)
        self.core_attention = KeyValueAttention(config, layer_number, pg_collection=pg_collection, k_channels=width)
        out = layers.out_groups * layers.out_rank
        self.linear_group_proj = LatentUpProjection(all_heads // layers.out_groups, out, **columns)
        self.linear_proj = RowParallelLinear(
            out, hidden, config=config, init_method=config.output_layer_init_method, bias=False,
            input_is_parallel=True, skip_bias_add=True, is_expert=False, tp_group=self.tp_group,
        )  # fmt: skip
        self.compressor = self.indexer = None
        if self.rate:
            chooses = layers.has_indexer(layer_number)
            sizes = {"rate": self.rate, "tp_group": self.tp_group}
            self.compressor = Compressor(config, width=width, overlaps=chooses, **sizes)
            if chooses:
                self.indexer = EntryIndexer(
                    config, query_rank=layers.query_rank, heads=layers.index_heads, width=layers.index_dim,
                    topk=layers.index_topk, **sizes,
                )  # fmt: skip

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, packed_seq_params: Any = None, **_: Any
    ) -> tuple[Tensor, None]:
        """Map [s, 1, hidden] to [s, 1, hidden], each query within its own sequence; also return None for the bias."""
        assert packed_seq_params is not None, "DeepSeek-V4 takes packed sequences"
        own, num_tokens = OwnTokens.of(packed_seq_params, self.cp_group), PackedStream.of(packed_seq_params).num_tokens
        tables = kept_on(packed_seq_params, f"tables_of_{self.rotary}", lambda: self._tables(own.positions))
        query_latent = self.q_layernorm(self.linear_q_down_proj(hidden_states))
        query = self.linear_q_up_proj(query_latent)[0].squeeze(1).unflatten(-1, (-1, self.layers.head_dim))
        wide = query.to(torch.promote_types(query.dtype, torch.float32))
        query = F.rms_norm(wide, wide.shape[-1:], eps=self.config.layernorm_epsilon).to(query.dtype)
        keys = turn_last(self._over_ranks(self.kv_layernorm(self.linear_kv_proj(hidden_states))).squeeze(1), tables)
        keys, indices = own.gathered(keys), self._window(own, num_tokens)
        if self.compressor is not None:
            entries = PackedEntries.of(packed_seq_params, self.rate)
            if self.indexer is None:
                chosen = entries.seen(own.places)
            else:
                chosen = self.indexer(hidden_states, query_latent, own, entries, self._tables)
            indices = torch.cat([indices, torch.where(chosen < 0, -1, chosen + num_tokens)], dim=1)
            keys = torch.cat([keys, self.compressor(hidden_states, own, entries, self._tables)])
        out = self.core_attention(turn_last(query, tables), keys, indices)
        out = turn_last(out, RotaryTables(tables.cos, -tables.sin)).flatten(1).unflatten(-1, (self.num_groups, -1))
        weight = self.linear_group_proj().unflatten(0, (self.num_groups, -1))
        grouped = torch.einsum("tgi,goi->tgo", out, weight).flatten(1)
        return self.linear_proj(grouped.unsqueeze(1))[0], None

    def _tables(self, positions: Tensor) -> RotaryTables:
        return RotaryTables(*self.rotary.tables(positions))

    def _window(self, own: OwnTokens, num_tokens: int) -> Tensor:
        """Return [t, window]: the tokens of the stream in the window of each of this rank's tokens, -1 for none."""
        back = torch.arange(min(self.core_attention.window or num_tokens, num_tokens), device=own.places.device)
        return torch.where(back <= own.positions[:, None], own.places[:, None] - back, -1)

    def _over_ranks(self, x: Tensor) -> Tensor:
        """Gather tokens on every tensor-parallel rank; the gradient is summed over the ranks."""
        if self.config.sequence_parallel:
            return gather_from_sequence_parallel_region(x, group=self.tp_group)
        return copy_to_tensor_model_parallel_region(x, group=self.tp_group)
