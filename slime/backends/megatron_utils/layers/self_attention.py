"""Grouped-query self-attention of megatron-core, with the rotary embedding of :mod:`.rotary`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from slime.backends.megatron_utils import cpu_platform, wheel_fixes  # noqa: F401

# isort: split
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import (
    _yarn_get_concentration_factor_from_config as yarn_mscale,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import SelfAttention

from slime.backends.megatron_utils.layers.rotary import RotaryTables, apply_rotary, rotary_tables


class PackedSelfAttention(SelfAttention):
    """Queries and keys are rotated as soon as they exist; the base class gets no angles, so it rotates nothing."""

    _tables: RotaryTables | None = None
    """Of the micro-batch in this forward call; None outside of one."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        *args: Any,
        rotary_pos_emb: Tensor | tuple[Tensor, Tensor] | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """As the base class; packed micro-batches take the way described above."""
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
            packed_seq_params, freqs, num_tokens, cp_rank=group.rank(), cp_size=group.size(),
            interleaved=self.config.rotary_interleaved, mscale=yarn_mscale(self.config),
        )  # fmt: skip
        try:
            return super().forward(
                hidden_states, attention_mask, *args, packed_seq_params=packed_seq_params, **options
            )
        finally:
            self._tables = None

    def get_query_key_value_tensors(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        """Query, key, value (and gate), [t, 1, heads, head dimension], rotated when a forward call asks for it."""
        query, key, *others = super().get_query_key_value_tensors(*args, **options)
        if self._tables is not None:
            query, key = (
                apply_rotary(x.squeeze(1), self._tables, interleaved=self.config.rotary_interleaved).unsqueeze(1)
                for x in (query, key)
            )
        return (query, key, *others)
