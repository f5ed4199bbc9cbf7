"""Causal attention over packed sequences: the self-attention and core attention of our layer specs.

Shapes: t = tokens of this rank, h = heads of this rank, d = head dimension; "thd" is [t, h, d] with the sequences of a
micro-batch concatenated, and "sbhd" is the padded [s, b, h, d].

On CUDA in bf16 or fp16 one flash kernel runs over all sequences; otherwise (CPU, fp32, heads wider than 256, or
``--attention-backend unfused``) torch's scaled-dot-product attention runs over each one (:mod:`.attention_kernels`).
Softmax with a sink: :mod:`.sink_attention`.  With context parallelism a rank has two chunks of every sequence:
:func:`zigzag_attention`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import (
    _yarn_get_concentration_factor_from_config as yarn_mscale,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.weak import WeakTensorKeyDictionary

from slime.backends.megatron_utils import cpu_platform
from slime.backends.megatron_utils.layers.attention_kernels import (
    MAX_FLASH_WIDTH,
    per_sequence_attention,
    varlen_attention,
)
from slime.backends.megatron_utils.layers.rotary import RotaryTables, apply_rotary, cumulative_lengths, rotary_tables
from slime.backends.megatron_utils.layers.row_copies import RowCopies, copy_rows
from slime.backends.megatron_utils.layers.sink_attention import make_sinks, varlen_sink_attention
from slime.train_data.context_parallel import CPRank

cpu_platform.mend_missing_transformer_engine()


class PackedAttention(MegatronModule):
    """softmax(q k^T * scale + causal mask) v, within each packed sequence.

    Every query sees the keys of its own sequence up to its own position, whatever the packing and the layout.  In a
    layer with a window (``--window-size LEFT,0``, ``--window-attn-skip-freq``) it sees its own key and the LEFT keys
    before it.  With ``--softmax-type learnable`` each head has a sink: a learned logit in the softmax's denominator.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        k_channels: int | None = None,
        **_: Any,
    ) -> None:
        """Build with the arguments that megatron-core passes to a core attention; ``k_channels`` is the key width of
        multi-latent attention.
        """
        super().__init__(config=config)
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        self.cp_group = pg_collection.cp
        self.tp_group = pg_collection.tp
        self.softmax_offset: torch.nn.Parameter | None
        """Sinks of this rank's heads, [h]; megatron-core's name for them."""
        has_sinks = config.softmax_type == "learnable"
        self.register_parameter("softmax_offset", make_sinks(config, self.tp_group) if has_sinks else None)
        self.scale = softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(k_channels or config.kv_channels)
        is_local = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window = config.window_size[0] + 1 if is_local else None
        """Number of keys that a query sees, including its own; None for all."""
        self.is_unfused = config.attention_backend in (AttnBackend.unfused, AttnBackend.local)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return the sinks, sharded by heads, as checkpoint entries; empty without sinks."""
        state = self.state_dict(prefix="", keep_vars=True)
        group = (metadata or {}).get("dp_cp_group")
        cut = {"softmax_offset": 0}
        return make_sharded_tensors_for_checkpoint(
            state, prefix, cut, sharded_offsets, tp_group=self.tp_group, dp_cp_group=group
        )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Attend causally, each query within its own sequence.

        Args:
            query, key, value: [t, h, d] when packed, else [s, b, h, d]; keys may have fewer heads (GQA).
            packed_seq_params: lengths over all context-parallel ranks (each a multiple of 2 * cp if cp > 1).

        Returns:
            [t, 1, h * d] when packed, else [s, b, h * d].
        """
        if packed_seq_params is not None:
            cu = cumulative_lengths(packed_seq_params)
            out = self._attend_packed(query, key, value, cu, int(packed_seq_params.max_seqlen_q))
            return out.reshape(out.size(0), 1, -1)
        length, batch = query.shape[:2]
        full_length = length * self.cp_group.size()
        cu = torch.arange(batch + 1, dtype=torch.int32, device=query.device) * full_length
        flat = [x.transpose(0, 1).flatten(0, 1) for x in (query, key, value)]
        out = self._attend_packed(flat[0], flat[1], flat[2], cu, full_length)
        return out.reshape(batch, length, -1).transpose(0, 1).contiguous()

    def _attend_packed(self, query: Tensor, key: Tensor, value: Tensor, cu: Tensor, max_length: int) -> Tensor:
        """Map [t, h, d] inputs to [t, h, d_v]; ``cu`` has the cumulative lengths of the whole sequences."""
        cp = CPRank(self.cp_group.rank(), self.cp_group.size())
        if cp.size == 1:
            return self._attend(query, key, value, cu, cu, max_length, max_length)
        return zigzag_attention(self._attend, query, key, value, cu, max_length, self.cp_group, cp)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int
    ) -> Tensor:
        """Attend causally in packed sequences, each with its last query at the position of its last key."""
        sinks = self.softmax_offset
        is_served = query.dtype in (torch.bfloat16, torch.float16) and query.size(-1) <= MAX_FLASH_WIDTH
        if query.is_cuda and is_served and not self.is_unfused:
            sizes = cu_q, cu_k, max_q, max_k
            if sinks is None:
                return varlen_attention(query, key, value, *sizes, scale=self.scale, window=self.window)
            return varlen_sink_attention(query, key, value, sinks, *sizes, scale=self.scale, window=self.window)
        lengths_q, lengths_k = cu_q.diff().tolist(), cu_k.diff().tolist()
        with sdpa_kernel(SDPBackend.MATH) if self.is_unfused else contextlib.nullcontext():
            return per_sequence_attention(
                query, key, value, lengths_q, lengths_k, scale=self.scale, window=self.window, sinks=sinks
            )


# Context parallelism: each rank has two chunks of every sequence.
#
# A sequence of length L is cut into 2 cp chunks of c = L / (2 cp) tokens.  Rank r has the chunks r and 2 cp - 1 - r,
# so that all ranks have the same work ("zigzag"; the load balancing of Llama 3, arXiv 2407.21783, 3.3.2).  Keys and
# values are all-gathered.  The keys visible to a chunk end where the chunk ends, so a rank's chunks are 2 S ordinary
# causal problems in one packed call: the queries as they are, and for each chunk a copy of the keys that it sees.
#
# Shapes: S = sequences of the micro-batch, t = tokens of this rank (t = sum of 2 c), h = heads, d = head dimension,
# K = (2 cp + 1) t / 2 key rows that the rank's chunks see together.


Attend = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int, int], Tensor]
"""(query, key, value, cu_q, cu_k, max_q, max_k) -> output; each block of queries is aligned with the end of its keys.
"""


@dataclass(frozen=True, slots=True)
class ZigzagPlan:
    """The gathered rows that each chunk of a rank attends to, shared by all layers of a micro-batch."""

    cu_q: Tensor
    """int32 [2 S + 1], cumulative lengths of the chunks, in the order of this rank's tokens."""
    cu_k: Tensor
    """int32 [2 S + 1], cumulative numbers of keys that the chunks see."""
    keys_K: RowCopies
    """These keys, as copies of the gathered rows."""

    @classmethod
    def build(cls, cu: Tensor, num_local: int, cp: CPRank) -> ZigzagPlan:
        """Build the plan from the cumulative lengths [S + 1] of whole sequences, each a multiple of 2 cp, without
        synchronizing with the device.
        """
        chunk_S = cu.diff().long() // (2 * cp.size)
        seen = torch.tensor([cp.rank + 1, 2 * cp.size - cp.rank], device=cu.device)
        keys_2S = (chunk_S[:, None] * seen).flatten()
        cu_q, cu_k = (F.pad(x.cumsum(0), (1, 0)) for x in (chunk_S.repeat_interleave(2), keys_2S))
        num_keys = (2 * cp.size + 1) * num_local // 2
        block_K = torch.arange(len(keys_2S), device=cu.device).repeat_interleave(keys_2S, output_size=num_keys)
        position_K = torch.arange(num_keys, device=cu.device) - cu_k[block_K]
        sequence_K = block_K // 2
        length_K = chunk_S[sequence_K]
        number_K = position_K // length_K  # of the chunk within its sequence
        is_second_K = number_K >= cp.size
        owner_K = torch.where(is_second_K, 2 * cp.size - 1 - number_K, number_K)
        first_K = cu[:-1].long()[sequence_K] // cp.size + is_second_K * length_K
        rows_K = owner_K * num_local + first_K + position_K % length_K
        return cls(cu_q.int(), cu_k.int(), RowCopies.of(rows_K, cp.size * num_local))


_PLANS = WeakTensorKeyDictionary()
"""Plans by cumulative lengths: the first layer of a micro-batch builds it for the other layers and recomputation."""


def _plan_of(cu: Tensor, num_local: int, cp: CPRank) -> ZigzagPlan:
    known: dict[tuple[int, CPRank], ZigzagPlan] = _PLANS.setdefault(cu, {})
    if (num_local, cp) not in known:
        known[num_local, cp] = ZigzagPlan.build(cu, num_local, cp)
    return known[num_local, cp]


def zigzag_attention(
    attend: Attend,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu: Tensor,
    max_length: int,
    cp_group: torch.distributed.ProcessGroup,
    cp: CPRank,
) -> Tensor:
    """Attend from this rank's chunks of every sequence to all earlier keys on any rank; differentiable.

    Args:
        query, key, value: [t, h, d] of this rank; keys may have fewer heads.
        cu: [S + 1] cumulative lengths of whole sequences, each a multiple of 2 cp.
        max_length: an upper bound on the length of a sequence.

    Returns:
        [t, h, d_v].
    """
    plan = _plan_of(cu, query.size(0), cp)
    keys, values = (
        copy_rows(gather_from_sequence_parallel_region(x.contiguous(), group=cp_group), plan.keys_K)
        for x in (key, value)
    )
    longest = max_length // (2 * cp.size)
    return attend(query, keys, values, plan.cu_q, plan.cu_k, longest, longest * (2 * cp.size - cp.rank))


# Grouped-query self-attention, with the rotary embedding of :mod:`.rotary`


class PackedSelfAttention(SelfAttention):
    """Self-attention that applies the rotary embedding itself; the base class gets no angles and rotates nothing."""

    tables_name = "rotary_tables"
    """Key of a micro-batch's cached tables; layers with other angles need another key."""
    _tables: RotaryTables | None = None
    """Tables of the current forward call's micro-batch; None outside of a call."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        *args: Any,
        rotary_pos_emb: Tensor | tuple[Tensor, Tensor] | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Run the base class's attention, with packed queries and keys rotated here."""
        skips = self.config.no_rope_freq
        freqs = rotary_pos_emb[0] if isinstance(rotary_pos_emb, tuple) else rotary_pos_emb
        if packed_seq_params is None or freqs is None or (skips and skips[self.layer_number - 1]):
            return super().forward(
                hidden_states, attention_mask, *args,
                rotary_pos_emb=rotary_pos_emb, packed_seq_params=packed_seq_params, **options,
            )  # fmt: skip
        group = self.pg_collection.cp
        num_tokens = hidden_states.size(0) * hidden_states.size(1)
        if self.config.sequence_parallel:
            num_tokens *= self.pg_collection.tp.size()
        self._tables = rotary_tables(
            packed_seq_params, freqs, num_tokens, CPRank(group.rank(), group.size()),
            interleaved=self.config.rotary_interleaved, mscale=yarn_mscale(self.config), name=self.tables_name,
        )  # fmt: skip
        try:
            return super().forward(
                hidden_states, attention_mask, *args, packed_seq_params=packed_seq_params, **options
            )
        finally:
            self._tables = None

    def get_query_key_value_tensors(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        """Return query, key, value (and gate), [t, 1, heads, head dimension]; query and key are rotated if the current
        forward call has tables.
        """
        query, key, *others = super().get_query_key_value_tensors(*args, **options)
        if self._tables is not None:
            query, key = (
                apply_rotary(x.squeeze(1), self._tables, interleaved=self.config.rotary_interleaved).unsqueeze(1)
                for x in (query, key)
            )
        return (query, key, *others)
