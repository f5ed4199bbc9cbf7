"""Linear attention by the gated delta rule, in every parallel layout.

    q, k, v, z, b, a = projections of the hidden state
    q, k, v = silu(causal convolution of q, k, v over the last few tokens, channel by channel)
    o = gated delta rule of q, k, v with log decay -exp(A) softplus(a + bias) and write strength sigmoid(b)
    out = projection of norm(o) * silu(z)

megatron-core's layer supports neither packed sequences nor context parallelism, and runs only on CUDA.

The unit of sharding is a key head with its value heads: tensor parallelism distributes them, and context parallelism
distributes those of a rank again (:func:`heads_for_tokens`).  All parameters are therefore ordered by key head.

Shapes: s = tokens of this tensor-parallel rank under sequence parallelism, else t; t = tokens of this context-parallel
rank; T = t without context parallelism, else the tokens of the whole stream; h = key heads of this rank, and of these
its share in the exchange; r = value heads of a key head; dk, dv = widths of keys and values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slime.backends.megatron_utils import cpu_platform

# isort: split
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import checkpoint
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import all_to_all, copy_to_tensor_model_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)
from megatron.core.utils import divide
from torch import Tensor

from slime.backends.megatron_utils.layers.rotary import natural_order
from slime_plugins.models.qwen3_next.delta_rule import gated_delta_rule
from slime_plugins.models.qwen3_next.packed_rows import PackedRows, rows_or_zeros


@dataclass
class GatedDeltaNetSubmodules:
    """The input projection (everything computed from the hidden state) and the output projection."""

    in_proj: ModuleSpec | type
    out_proj: ModuleSpec | type


class GatedNorm(torch.nn.Module):
    """``x / rms(x) * weight * silu(gate)`` for each head, computed in fp32.

    The weight is replicated on tensor-parallel ranks, each of which has only its own heads, so its gradient is summed.
    """

    def __init__(self, config: TransformerConfig, size: int) -> None:
        super().__init__()
        self.eps = config.layernorm_epsilon
        self.weight = torch.nn.Parameter(torch.ones(size, **cpu_platform.of_new_parameters(config)))
        self.is_summed_later = config.sequence_parallel
        """The gradient is summed with those of other norms, at the end of the backward pass."""
        self.weight.sequence_parallel = self.is_summed_later  # type: ignore[attr-defined]

    def forward(self, x: Tensor, gate: Tensor, tp_group: torch.distributed.ProcessGroup) -> Tensor:
        """Apply the gated norm: [..., size] of the dtype of ``x``."""
        weight = self.weight
        if not self.is_summed_later:
            weight = copy_to_tensor_model_parallel_region(weight, group=tp_group)
        normed = F.rms_norm(x.float(), (x.size(-1),), weight.float(), self.eps)
        return (normed * F.silu(gate.float())).to(x.dtype)


class GatedDeltaNet(MegatronModule):
    """The self-attention of a layer without softmax.

    Invariant: outputs and gradients of a sequence depend neither on the packing nor on the parallel layout.  Mamba-2
    (``slime_plugins/models/nemotron_h``) is this layer with another rule in :meth:`core`.
    """

    gates_of_value_head = 2
    """Outputs of ``in_proj`` per value head for the rule: write strength and step."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: GatedDeltaNetSubmodules,
        layer_number: int,
        attn_mask_type: AttnMaskType = AttnMaskType.causal,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        """Build with the arguments that megatron-core's TransformerLayer passes to self-attention."""
        super().__init__(config=config)
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        self.layer_number = layer_number
        self.tp_group, self.cp_group = pg_collection.tp, pg_collection.cp
        assert config.linear_num_key_heads and config.linear_num_value_heads
        assert config.linear_key_head_dim and config.linear_value_head_dim and config.linear_conv_kernel_dim
        self.key_width, self.value_width = config.linear_key_head_dim, config.linear_value_head_dim
        self.ratio = divide(config.linear_num_value_heads, config.linear_num_key_heads)
        self.num_heads = divide(config.linear_num_key_heads, self.tp_group.size())
        self.num_shared_heads = divide(self.num_heads, self.cp_group.size())
        self.conv_width = config.linear_conv_kernel_dim
        is_selective = config.recompute_granularity == "selective"
        self.recomputes_core = is_selective and "core_attn" in config.recompute_modules

        values = self.ratio * self.value_width
        self.channels = 2 * self.key_width + values
        """Channels of the convolution per key head: q, k, v."""
        self.part_sizes = (self.channels, self.gates_of_value_head * self.ratio, values)
        """Sizes of the outputs of ``in_proj`` per key head: q, k and v; b and a; z."""
        self.in_proj = build_module(
            submodules.in_proj,
            config.hidden_size,
            config.linear_num_key_heads * sum(self.part_sizes),
            config=config,
            init_method=config.init_method,
            gather_output=False,
            bias=False,
            skip_bias_add=False,
            is_expert=False,
            tp_group=self.tp_group,
        )
        self.conv_weight = cut_parameter(config, self.num_heads * self.channels, self.conv_width)
        self.conv_bias: torch.nn.Parameter | None = None
        self.A_log = cut_parameter(config, self.num_heads * self.ratio)
        self.dt_bias = cut_parameter(config, self.num_heads * self.ratio)
        self.add_parameters(config)
        self.out_proj = build_module(
            submodules.out_proj,
            config.linear_num_value_heads * self.value_width,
            config.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            bias=config.add_bias_linear,
            input_is_parallel=True,
            skip_bias_add=True,
            is_expert=False,
            tp_group=self.tp_group,
        )
        if config.perform_initialization:
            self._initialize()

    def add_parameters(self, config: TransformerConfig) -> None:
        """Add the parameters of this rule; :func:`cut_parameter` creates those of the layer."""
        self.out_norm = GatedNorm(config, self.value_width)

    @torch.no_grad()
    def _initialize(self) -> None:
        """Initialize decays of all speeds, from 1 / 16 on, equally in every layout; the convolution starts as the
        identity.
        """
        num_all = self.A_log.numel() * self.tp_group.size()
        head = torch.arange(self.A_log.numel(), device=self.A_log.device) + self.tp_group.rank() * self.A_log.numel()
        self.A_log.copy_((16 * (head + 1) / num_all).log())
        self.dt_bias.fill_(1.0)
        self.conv_weight.zero_()
        self.conv_weight[:, -1] = 1.0

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Args:
            hidden_states: [s, 1, hidden]
            attention_mask: ignored; every token sees those before it.
            packed_seq_params: lengths over all context-parallel ranks.

        Returns:
            [s, 1, hidden], and the bias of the output projection (None without one).
        """
        assert packed_seq_params is not None, "a gated delta net needs packed sequences (packed_seq_params)"
        projected = self.in_proj(hidden_states)[0].squeeze(1).unflatten(-1, (self.num_heads, -1))
        mixed, gate = projected.split([sum(self.part_sizes[:2]), self.part_sizes[2]], dim=-1)  # [t, h, ...]
        is_exchanged = self.cp_group.size() > 1
        if is_exchanged:
            order = natural_order(packed_seq_params, self.cp_group.size())
            mixed = heads_for_tokens(mixed, order, self.cp_group)
        rows = PackedRows.of(packed_seq_params, self.conv_width)

        def core(mixed: Tensor) -> Tensor:
            return self.core(mixed, rows)

        out = checkpoint(core, False, mixed) if self.recomputes_core and self.training else core(mixed)
        if is_exchanged:
            out = tokens_for_heads(out, order, self.cp_group)
        return self.out_proj(self.normed(out, gate).flatten(1).unsqueeze(1))

    def normed(self, out: Tensor, gate: Tensor) -> Tensor:
        """Normalize the outputs [t, h, r * dv] of all heads of this rank, and apply the gate of the same shape."""
        per_head = (-1, self.num_heads * self.ratio, self.value_width)
        return self.out_norm(out.reshape(per_head), gate.reshape(per_head), self.tp_group)

    def core(self, mixed: Tensor, rows: PackedRows) -> Tensor:
        """Return [T, h, r * dv] from the projections [T, h, 2 dk + r dv + 2 r] of this rank's share of heads."""
        qkv, strength_and_step = mixed.split(self.part_sizes[:2], dim=-1)
        qkv = F.silu(self.convolve(qkv.flatten(1), rows)).unflatten(-1, (-1, self.channels))
        query, key, value = qkv.split([self.key_width, self.key_width, self.ratio * self.value_width], dim=-1)
        strength, step = strength_and_step.split(self.ratio, dim=-1)  # [T, h, r]
        decay_rate, step_bias = (self.share(x).float().view(-1, self.ratio) for x in (self.A_log, self.dt_bias))
        log_decay = -decay_rate.exp() * F.softplus(step.float() + step_bias)
        value = value.unflatten(-1, (self.ratio, self.value_width))
        out = gated_delta_rule(query, key, value, log_decay, strength.float().sigmoid(), rows)
        return out.flatten(2)

    def convolve(self, x: Tensor, rows: PackedRows) -> Tensor:
        """Convolve [T, channels]: each channel over the last tokens of its own sequence."""
        weight = self.share(self.conv_weight)[:, None].to(x.dtype)
        bias = None if self.conv_bias is None else self.share(self.conv_bias).to(x.dtype)
        padded = rows_or_zeros(x, rows.conv_tokens).T[None]
        return F.conv1d(padded, weight, bias, groups=weight.size(0))[0].T.index_select(0, rows.conv_places)

    def share(self, parameter: Tensor) -> Tensor:
        """Return the part of a parameter that belongs to this context-parallel rank's share of heads."""
        return parameter.chunk(self.cp_group.size())[self.cp_group.rank()]

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[tuple[int, int, int], ...] = (), metadata: dict | None = None
    ) -> ShardedStateDict:
        """Return the base class's entries, with this module's parameters marked as sharded."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        own: dict[str, Any] = {}
        self._save_to_state_dict(own, "", keep_vars=True)
        state = make_sharded_tensors_for_checkpoint(
            own,
            prefix,
            dict.fromkeys(own, 0),
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        for name, module in self.named_children():
            part = sharded_state_dict_default(
                module, f"{prefix}{name}.", sharded_offsets, metadata, tp_group=self.tp_group
            )
            state.update(part)
        return state


def gated_delta_net_spec(module: type[GatedDeltaNet]) -> ModuleSpec:
    """Return the self-attention of a layer with a gated delta net, or with another rule in its place."""
    provider = LocalSpecProvider()
    return ModuleSpec(
        module=module,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=GatedDeltaNetSubmodules(
            in_proj=provider.column_parallel_linear(), out_proj=provider.row_parallel_linear()
        ),
    )


def cut_parameter(config: TransformerConfig, *shape: int) -> torch.nn.Parameter:
    """Return a parameter whose rows are sharded over tensor-parallel ranks."""
    parameter = torch.nn.Parameter(torch.empty(*shape, **cpu_platform.of_new_parameters(config)))
    set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)
    return parameter


# Context parallelism of a layer that needs whole sequences: ranks exchange tokens for heads and back (all-to-all).
#
# A context-parallel rank holds chunks ``r`` and ``2 cp - 1 - r`` of every sequence, for all of its heads.  A
# recurrence needs the tokens in order, so each rank gets all tokens for a share of the heads, and returns the outputs.
#
# Shapes: t = tokens of this rank, T = t * cp tokens of the whole stream, h = heads that the ranks share, w = any
# width.


def heads_for_tokens(x: Tensor, order: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchange [t, h, w] of every rank for [T, h / cp, w]: all tokens, in natural order, of this rank's share of
    heads.

    Args:
        x: heads in order; cp must divide their number.
        order: result of :func:`natural_order`.
        group: the context-parallel ranks.
    """
    shares = x.unflatten(1, (group.size(), -1)).transpose(0, 1).flatten(0, 1).contiguous()
    return all_to_all(group, shares).index_select(0, order)


def tokens_for_heads(x: Tensor, order: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Invert :func:`heads_for_tokens`."""
    shares = all_to_all(group, x.index_select(0, order.argsort()).contiguous())
    return shares.unflatten(0, (group.size(), -1)).transpose(0, 1).flatten(1, 2)
