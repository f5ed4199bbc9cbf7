"""Latent attention to selected keys, in every parallel layout.

The keys and values of all heads are one latent per token (multi-latent attention in its absorbed form),
[kv_lora_rank | rotary], so a query's keys can be gathered by index.  The layers' weights are those of plain
multi-latent attention, plus the indexer's in the layers that select keys.

Shapes: s = tokens of this tensor-parallel rank under sequence parallelism, else t; t = tokens of this context-parallel
rank; T = tokens of the whole stream; n = heads of this rank; k = keys per query; c = kv_lora_rank.
"""

from __future__ import annotations

from typing import Any

from slime.backends.megatron_utils import cpu_platform

# isort: split
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor

from slime.backends.megatron_utils.layers.latent_attention import (
    LatentAttention,
    ReplicatedLinear,
    latent_attention_spec,
)
from slime.backends.megatron_utils.layers.rotary import kept_on, rotate_pairs
from slime_plugins.models.glm5.indexer import IndexerSettings, PackedStream, choose_keys, rotate_last
from slime_plugins.models.glm5.sparse_attention import sparse_attention

INDEXER_MODULES = ("wq_b", "wk", "weights_proj", "k_norm")
"""Submodules of self-attention that belong to the indexer."""


class LatentUpProjection(ColumnParallelLinear):
    """The up projection of keys and values, which is absorbed into queries and outputs and never applied to tokens.

    A call returns the weight, because Megatron's data parallelism waits for the all-gather of parameters in a
    pre-forward hook, which an attribute access would bypass.
    """

    def forward(self) -> Tensor:
        """Return the weight [n * (qk + v), c]."""
        return self.weight


class IndexKeyNorm(torch.nn.LayerNorm):
    """LayerNorm of the indexer's keys, computed in fp32 whatever the model's norms."""

    def __init__(self, config: MLATransformerConfig, size: int) -> None:
        super().__init__(size, eps=1e-6, **cpu_platform.of_new_parameters(config))
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Apply the norm; the result has the shape and dtype of ``x``."""
        normed = F.layer_norm(x.float(), self.normalized_shape, self.weight.float(), self.bias.float(), self.eps)
        return normed.to(x.dtype)


class SparseLatentAttention(LatentAttention):
    """Self-attention of one layer: selects keys, or reuses the selection of layer ``source_layer``.

    The selection is cached on the micro-batch's ``packed_seq_params``, by the number of the selecting layer.  So it is
    available when a layer is recomputed, and pipelined micro-batches do not mix.
    """

    def __init__(
        self, *args: Any, settings: IndexerSettings, source_layer: int, is_computing: bool, **kwargs: Any
    ) -> None:
        """Build with the arguments of :class:`LatentAttention`.

        Args:
            settings: sizes of the indexer.
            source_layer: number (from 1, over the whole model) of the layer whose selection is used.
            is_computing: True if that is this layer, which then has an indexer.
        """
        super().__init__(*args, **kwargs)
        self.settings = settings
        self.source_layer = source_layer
        self.is_computing = is_computing
        if is_computing:
            self._build_indexer()

    def _build_indexer(self) -> None:
        config, settings = self.config, self.settings
        assert config.q_lora_rank is not None
        self.wq_b = ReplicatedLinear(config.q_lora_rank, settings.num_heads * settings.head_dim, config=config)
        self.wk = ReplicatedLinear(config.hidden_size, settings.head_dim, config=config)
        self.weights_proj = ReplicatedLinear(config.hidden_size, settings.num_heads, config=config)
        self.k_norm = IndexKeyNorm(config, settings.head_dim)
        # The selection of keys has no gradient.  If these parameters were trainable, weight decay would shrink them,
        # and a gradient bucket that waits for their gradients would never be reduced.
        for name in INDEXER_MODULES:
            getattr(self, name).requires_grad_(False)

    def _core(self, *_: Any) -> torch.nn.Module:
        return IdentityOp()

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Args:
            hidden_states: [s, 1, hidden]
            attention_mask: ignored; attention is causal.
            packed_seq_params: lengths over all context-parallel ranks.

        Returns:
            [s, 1, hidden], and the bias of the output projection (None without one).
        """
        assert packed_seq_params is not None, "sparse attention needs packed sequences (packed_seq_params)"
        query_latent, kv_latent, rotary_key = self.compress(hidden_states)
        cosines, sines = self.rotary_tables(rotary_key, packed_seq_params)
        indices = self.chosen_keys(hidden_states, query_latent, packed_seq_params, cosines, sines)
        turned_key = rotate_pairs(rotary_key, cosines[:, None], sines[:, None])
        key = torch.cat([self._over_tensor_ranks(kv_latent), turned_key], dim=-1).squeeze(1)
        if self.pg_collection.cp.size() > 1:
            key = gather_from_sequence_parallel_region(key, group=self.pg_collection.cp)

        def absorb(query_latent: Tensor) -> tuple[Tensor]:
            return (self.absorbed_query(query_latent, cosines, sines),)

        def attend(query: Tensor, key: Tensor) -> Tensor:
            return self.attend(query, key, indices)

        return self.linear_proj(self.recomputed(absorb, (query_latent,), attend, key))

    def absorbed_query(self, query_latent: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        """Map query latents [s, 1, rank] to [t, n, c + rope]: queries that attend directly to the latents."""
        config = self.config
        query = self.linear_q_up_proj(query_latent)[0].squeeze(1).unflatten(-1, (self.num_heads, self.query_width))
        plain, turning = query.split([config.qk_head_dim, config.qk_pos_emb_head_dim], dim=-1)
        key_weight, _ = self._absorbed_weights()
        latent = torch.einsum("tnd,ndc->tnc", plain, key_weight)
        return torch.cat([latent, rotate_pairs(turning, cosines[:, None], sines[:, None])], dim=-1)

    def attend(self, query: Tensor, key: Tensor, indices: Tensor) -> Tensor:
        """Attend from queries [t, n, c + rope] to keys [T, c + rope] of the whole stream; return [t, 1, n * v]."""
        _, value_weight = self._absorbed_weights()
        latent = sparse_attention(query, key, indices, scale=self.softmax_scale, value_dim=self.config.kv_lora_rank)
        return torch.einsum("tnc,nvc->tnv", latent, value_weight).flatten(1).unsqueeze(1)

    def _absorbed_weights(self) -> tuple[Tensor, Tensor]:
        """Return the two parts of the up projection: for keys [n, qk, c], for values [n, v, c]."""
        weight = self.linear_kv_up_proj().unflatten(0, (self.num_heads, -1))
        key_weight, value_weight = weight.split([self.config.qk_head_dim, self.config.v_head_dim], dim=1)
        return key_weight, value_weight

    # The selection of keys

    def chosen_keys(
        self,
        hidden_states: Tensor,
        query_latent: Tensor,
        packed_seq_params: PackedSeqParams,
        cosines: Tensor,
        sines: Tensor,
    ) -> Tensor:
        """Return [t, k] indices in the whole stream, -1 for none: this layer's selection, or its source layer's."""
        choices = vars(packed_seq_params).setdefault("chosen_keys", {})
        if self.is_computing:
            choices[self.source_layer] = self.choose(hidden_states, query_latent, packed_seq_params, cosines, sines)
        assert self.source_layer in choices, (
            f"layer {self.layer_number} attends to the keys of layer {self.source_layer}, which has not chosen any "
            f"in this micro-batch (there are those of {sorted(choices)}); both must be on one pipeline stage"
        )
        return choices[self.source_layer]

    @torch.no_grad()
    def choose(
        self,
        hidden_states: Tensor,
        query_latent: Tensor,
        packed_seq_params: PackedSeqParams,
        cosines: Tensor,
        sines: Tensor,
    ) -> Tensor:
        """Score and select keys for this rank's rows; under sequence parallelism each rank handles a part of them."""
        settings, stream = self.settings, PackedStream.of(packed_seq_params)
        num_local, num_rank = hidden_states.size(0), cosines.size(0)
        first_local = self.tp_group.rank() * num_local if self.config.sequence_parallel else 0
        rows = slice(first_local, first_local + num_local)

        def turned(x: Tensor) -> Tensor:
            return rotate_last(x, cosines[rows], sines[rows], is_interleaved=settings.is_interleaved)

        hidden, latent = hidden_states.squeeze(1), query_latent.squeeze(1)
        query = turned(self.wq_b(latent).unflatten(-1, (settings.num_heads, settings.head_dim)))
        key = turned(self.k_norm(self.wk(hidden)))
        weight = F.linear(hidden.float(), self.weights_proj.weight.float())
        weight = weight * (settings.num_heads * settings.head_dim) ** -0.5
        cp_group = self.pg_collection.cp
        if self.config.sequence_parallel:
            key = _all_gather(key, self.tp_group)
        indices = choose_keys(
            query,
            weight,
            _all_gather(key, cp_group),
            stream,
            first_row=cp_group.rank() * num_rank + first_local,
            topk=settings.topk,
        )
        return _all_gather(indices, self.tp_group) if self.config.sequence_parallel else indices

    def rotary_tables(self, rotary_key: Tensor, packed_seq_params: PackedSeqParams | None) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [t, rope / 2] of this rank's contiguous part of the stream."""
        assert packed_seq_params is not None
        stream, num_rank, cp_group = PackedStream.of(packed_seq_params), rotary_key.size(0), self.pg_collection.cp
        assert stream.num_tokens == num_rank * cp_group.size(), (stream.num_tokens, num_rank, cp_group.size())

        def make() -> tuple[Tensor, Tensor]:
            return self.rotary.tables(stream.positions(cp_group.rank() * num_rank, num_rank))

        return kept_on(packed_seq_params, "contiguous_rotary_tables", make)


def sparse_attention_spec(
    config: MLATransformerConfig, settings: IndexerSettings, *, source_layer: int, is_computing: bool
) -> ModuleSpec:
    """Return the self-attention of a layer that uses the selection of ``source_layer``."""
    spec = latent_attention_spec(config)
    spec.module = SparseLatentAttention
    spec.params = {**spec.params, "settings": settings, "source_layer": source_layer, "is_computing": is_computing}
    spec.submodules.linear_kv_up_proj = LatentUpProjection
    return spec


def _all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-gather along the first dimension, without gradient."""
    if group.size() == 1:
        return x
    whole = x.new_empty(x.size(0) * group.size(), *x.shape[1:])
    dist.all_gather_into_tensor(whole, x.contiguous(), group=group)
    return whole
