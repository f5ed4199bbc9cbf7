"""Multi-latent attention: queries, keys and values are expanded from small latents (DeepSeek-V2, arXiv 2405.04434).

It replaces megatron-core's, which has three problems.  Without TransformerEngine its column-parallel down projections
have wrong gradients under tensor parallelism: the gather after them only splits the incoming gradient, so the
contributions of other ranks' heads to the shared rotary key are lost.  Its YaRN differs from the published models if
``mscale_all_dim`` is 0.  And each layer waits on the host for the sequence lengths.  Modules and parameters have
megatron-core's names.

Shapes: s = tokens of this tensor-parallel rank under sequence parallelism, else t; t = tokens of this context-parallel
rank; b = 1 when packed; n = heads of this rank; "qk", "rope" and "v" are the widths of a head's parts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.dist_checkpointing.utils import apply_prefix_mapping
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import CheckpointWithoutOutput, checkpoint
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.utils import divide
from torch import Tensor

from slime.backends.megatron_utils import cpu_platform
from slime.backends.megatron_utils.layers.attention import PackedAttention
from slime.backends.megatron_utils.layers.norm import Norm
from slime.backends.megatron_utils.layers.rotary import (
    LatentRotary,
    cumulative_lengths,
    kept_on,
    packed_positions,
    rotate_pairs,
)
from slime.train_data.context_parallel import CPRank

LATENT_NORM_EPSILON = 1e-6
"""Epsilon of the latents' norms, as in the published models, whatever ``--norm-epsilon`` is."""


class ReplicatedLinear(torch.nn.Linear):
    """A projection without bias, replicated on all tensor-parallel ranks.

    Under sequence parallelism each rank sees a slice of the tokens, so the weight is marked for the gradient
    all-reduce over the tensor-parallel group.
    """

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig) -> None:
        """Create the weight [output_size, input_size], initialized equally on all tensor-parallel ranks."""
        super().__init__(input_size, output_size, bias=False, **cpu_platform.of_new_parameters(config))
        if config.perform_initialization:
            config.init_method(self.weight)
        vars(self.weight)["sequence_parallel"] = config.sequence_parallel


class LatentAttention(MegatronModule):
    """Self-attention whose queries, keys and values are expanded from normalized latents.

    ``q = up(norm(down(x)))`` (or one direct projection), ``k, v = up(norm(down(x)))``, and one rotary key that all
    heads share.  Invariant: without tensor parallelism the backward pass gives complete gradients; with it they are
    complete after megatron-core's all-reduce for sequence parallelism.
    """

    def __init__(
        self,
        config: MLATransformerConfig,
        submodules: MLASelfAttentionSubmodules,
        layer_number: int,
        attn_mask_type: AttnMaskType = AttnMaskType.causal,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config)
        self.config: MLATransformerConfig
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        self.layer_number = layer_number
        self.pg_collection = pg_collection
        self.tp_group = pg_collection.tp
        self.num_heads = divide(config.num_attention_heads, self.tp_group.size())
        self.query_width = config.qk_head_dim + config.qk_pos_emb_head_dim
        self.rotary = LatentRotary.from_config(config)
        self.softmax_scale = self.rotary.softmax_scale(self.query_width)
        is_selective = config.recompute_granularity == "selective"
        self.recomputes_core = is_selective and "core_attn" in config.recompute_modules
        self.recomputes_up_proj = is_selective and "mla_up_proj" in config.recompute_modules

        heads, hidden = config.num_attention_heads, config.hidden_size
        if config.q_lora_rank is None:
            self.linear_q_proj = self._column(submodules.linear_q_proj, hidden, heads * self.query_width)
        else:
            rank = config.q_lora_rank
            self.linear_q_down_proj = build_module(submodules.linear_q_down_proj, hidden, rank, config=config)
            self.linear_q_up_proj = self._column(submodules.linear_q_up_proj, rank, heads * self.query_width)
            self.q_layernorm = build_module(
                submodules.q_layernorm, config=config, hidden_size=rank, eps=LATENT_NORM_EPSILON
            )
        rank = config.kv_lora_rank
        self.linear_kv_down_proj = build_module(
            submodules.linear_kv_down_proj, hidden, rank + config.qk_pos_emb_head_dim, config=config
        )
        self.linear_kv_up_proj = self._column(
            submodules.linear_kv_up_proj, rank, heads * (config.qk_head_dim + config.v_head_dim)
        )
        self.kv_layernorm = build_module(
            submodules.kv_layernorm, config=config, hidden_size=rank, eps=LATENT_NORM_EPSILON
        )
        self.core_attention = self._core(submodules, attn_mask_type, cp_comm_type)
        self.linear_proj = build_module(
            submodules.linear_proj,
            heads * config.v_head_dim,
            hidden,
            config=config,
            init_method=config.output_layer_init_method,
            bias=config.add_bias_linear,
            input_is_parallel=True,
            skip_bias_add=True,
            is_expert=False,
            tp_group=self.tp_group,
        )

    def _column(self, module: Any, input_size: int, output_size: int) -> torch.nn.Module:
        """Return a projection whose output heads are sharded over the tensor-parallel ranks."""
        return build_module(
            module,
            input_size,
            output_size,
            config=self.config,
            init_method=self.config.init_method,
            gather_output=False,
            bias=False,
            skip_bias_add=False,
            is_expert=False,
            tp_group=self.tp_group,
        )

    def _core(
        self, submodules: MLASelfAttentionSubmodules, attn_mask_type: AttnMaskType, cp_comm_type: str | None
    ) -> torch.nn.Module:
        """Build the core attention over expanded heads; subclasses may attend over the latents instead."""
        return build_module(
            submodules.core_attention,
            config=self.config,
            layer_number=self.layer_number,
            attn_mask_type=attn_mask_type,
            attention_type="self",
            softmax_scale=self.softmax_scale,
            k_channels=self.query_width,
            v_channels=self.config.v_head_dim,
            cp_comm_type=cp_comm_type,
            pg_collection=self.pg_collection,
        )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend causally, each query within its own sequence.

        Args:
            hidden_states: [s, b, hidden].
            attention_mask: ignored; attention is causal.
            packed_seq_params: lengths over all context-parallel ranks; None for b padded sequences.

        Returns:
            [s, b, hidden], and the bias of the output projection (None without one).
        """
        query_latent, kv_latent, rotary_key = self.compress(hidden_states)
        cosines, sines = self.rotary_tables(rotary_key, packed_seq_params)
        is_packed = packed_seq_params is not None

        def expand(query_latent: Tensor, kv_latent: Tensor, rotary_key: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            query, key, value = self.expand(query_latent, kv_latent, rotary_key, cosines, sines)
            if is_packed:
                query, key, value = query.squeeze(1), key.squeeze(1), value.squeeze(1)
            return query, key, value

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return self.core_attention(query, key, value, attention_mask, packed_seq_params=packed_seq_params)

        return self.linear_proj(self.recomputed(expand, (query_latent, kv_latent, rotary_key), attend))

    def recomputed(
        self, expand: Callable[..., tuple[Tensor, ...]], latents: tuple[Tensor, ...], attend: Callable[..., Tensor],
        *keys: Tensor,
    ) -> Tensor:  # fmt: skip
        """Return ``attend(*expand(*latents), *keys)``; in training, either is recomputed if the flags request it."""
        up_proj = CheckpointWithoutOutput(fp8=None) if self.recomputes_up_proj and self.training else None
        expanded = expand(*latents) if up_proj is None else up_proj.checkpoint(expand, *latents)
        if self.recomputes_core and self.training:
            out = checkpoint(attend, False, *expanded, *keys)
        else:
            out = attend(*expanded, *keys)
        if up_proj is not None:
            up_proj.discard_output_and_register_recompute(out)
        return out

    def compress(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the normalized latents of queries [s, b, rank] and of keys and values [s, b, rank], and the rotary
        key.

        Without ``--q-lora-rank`` the first is ``hidden_states``.  The rotary key [t, b, rope] is not rotated yet.  It
        is gathered on every tensor-parallel rank; its gradient is summed over them, because each uses it for its own
        heads.
        """
        query_latent = hidden_states
        if self.config.q_lora_rank is not None:
            query_latent = self.q_layernorm(self.linear_q_down_proj(hidden_states))
        combined = self.linear_kv_down_proj(hidden_states)
        kv_latent, rotary_key = combined.split([self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim], dim=-1)
        return query_latent, self.kv_layernorm(kv_latent), self._over_tensor_ranks(rotary_key)

    def _over_tensor_ranks(self, x: Tensor) -> Tensor:
        """Gather [t, ...] on every tensor-parallel rank; the gradient is summed over the ranks."""
        if self.config.sequence_parallel:
            return gather_from_sequence_parallel_region(x, group=self.tp_group)
        return copy_to_tensor_model_parallel_region(x, group=self.tp_group)

    def expand(
        self, query_latent: Tensor, kv_latent: Tensor, rotary_key: Tensor, cosines: Tensor, sines: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Expand the result of :meth:`compress` to rotated queries and keys [t, b, n, qk + rope] and values
        [t, b, n, v].
        """
        config = self.config
        project = self.linear_q_proj if config.q_lora_rank is None else self.linear_q_up_proj
        query = project(query_latent)[0].unflatten(-1, (self.num_heads, self.query_width))
        plain_query, rotary_query = query.split([config.qk_head_dim, config.qk_pos_emb_head_dim], dim=-1)
        kv = self.linear_kv_up_proj(kv_latent)[0].unflatten(-1, (self.num_heads, -1))
        plain_key, value = kv.split([config.qk_head_dim, config.v_head_dim], dim=-1)
        rotated_key = rotate_pairs(rotary_key[:, :, None], cosines, sines).expand(-1, -1, self.num_heads, -1)
        query = torch.cat([plain_query, rotate_pairs(rotary_query, cosines, sines)], dim=-1)
        return query, torch.cat([plain_key, rotated_key], dim=-1), value.contiguous()

    def rotary_tables(self, rotary_key: Tensor, packed_seq_params: PackedSeqParams | None) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [t, 1, 1, rope / 2] of this rank's tokens; layers of a micro-batch share them."""
        cp_group = self.pg_collection.cp
        num_local = rotary_key.size(0)

        def make(cu: Tensor) -> tuple[Tensor, Tensor]:
            positions = packed_positions(cu, num_local, CPRank(cp_group.rank(), cp_group.size()))
            cosines, sines = self.rotary.tables(positions)
            return cosines[:, None, None], sines[:, None, None]

        if packed_seq_params is None:
            return make(torch.tensor([0, num_local * cp_group.size()], device=rotary_key.device))
        return kept_on(packed_seq_params, "latent_rotary_tables", lambda: make(cumulative_lengths(packed_seq_params)))

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[tuple[int, int, int], ...] = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Return the entries under the names of TransformerEngine's layers, where the latents' norms belong to the up
        projections.
        """
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        apply_prefix_mapping(
            state,
            {
                f"{prefix}q_layernorm.": f"{prefix}linear_q_up_proj.layer_norm_",
                f"{prefix}kv_layernorm.": f"{prefix}linear_kv_up_proj.layer_norm_",
            },
        )
        return state


def latent_attention_spec(config: TransformerConfig) -> ModuleSpec:
    """Return multi-latent attention over packed sequences."""
    provider = LocalSpecProvider()
    column = provider.column_parallel_linear()
    latent_norm = Norm if config.qk_layernorm else IdentityOp
    return ModuleSpec(
        module=LatentAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=MLASelfAttentionSubmodules(
            linear_q_proj=column,
            linear_q_down_proj=ReplicatedLinear,
            linear_q_up_proj=column,
            linear_kv_down_proj=ReplicatedLinear,
            linear_kv_up_proj=column,
            core_attention=PackedAttention,
            linear_proj=provider.row_parallel_linear(),
            q_layernorm=latent_norm,
            kv_layernorm=latent_norm,
        ),
    )
