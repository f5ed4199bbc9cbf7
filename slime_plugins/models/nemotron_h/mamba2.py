"""Mamba-2 as a layer's self-attention, in every parallel layout.

    z, x, B, C, d = projections of the hidden state
    x, B, C = silu(causal convolution of x, B, C over the last few tokens, channel by channel)
    y = state space of x with step softplus(d + bias) and rate -exp(A)
    out = projection of norm(y * silu(z)), the norm over each group's heads together

megatron-core's layer cannot be built without ``mamba-ssm`` and ``causal-conv1d``, so it runs only on CUDA, and its
state leaks from one packed sequence to the next.  In the terms of a gated delta net B is the key, C the query, x the
value, and a group a key head: parameters, sharding and context parallelism are those of :class:`GatedDeltaNet`.

Shapes: as there; h = groups of this rank, r = heads of a group, dk = width of the state, dv = width of a head.
"""

from __future__ import annotations

from slime.backends.megatron_utils import cpu_platform  # noqa: F401

# isort: split
import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from slime_plugins.models.nemotron_h.state_space import state_space
from slime_plugins.models.qwen3_next.gated_delta_net import GatedDeltaNet, cut_parameter
from slime_plugins.models.qwen3_next.packed_rows import PackedRows


class Mamba2(GatedDeltaNet):
    """Selective state space with scalar decays, heads in groups."""

    gates_of_value_head = 1

    def add_parameters(self, config: TransformerConfig) -> None:
        """Add the convolution's bias, the skip D of each head, and the norm's weight."""
        heads = self.num_heads * self.ratio
        self.conv_bias = cut_parameter(config, self.num_heads * self.channels)
        self.D = cut_parameter(config, heads)
        self.norm_weight = cut_parameter(config, heads * self.value_width)

    @torch.no_grad()
    def _initialize(self) -> None:
        """Initialize like the delta net, with a neutral bias, skip and norm."""
        super()._initialize()
        assert self.conv_bias is not None
        self.conv_bias.zero_()
        self.D.fill_(1.0)
        self.norm_weight.fill_(1.0)

    def core(self, mixed: Tensor, rows: PackedRows) -> Tensor:
        """Return [T, h, r * dv] from the projections [T, h, 2 dk + r dv + r] of this rank's share of groups."""
        convolved, step = mixed.split(self.part_sizes[:2], dim=-1)
        convolved = F.silu(self.convolve(convolved.flatten(1), rows)).unflatten(-1, (-1, self.channels))
        query, key, value = convolved.split([self.key_width, self.key_width, self.ratio * self.value_width], dim=-1)
        rate, bias, skip = (self.share(x).float().view(-1, self.ratio) for x in (self.A_log, self.dt_bias, self.D))
        value = value.unflatten(-1, (self.ratio, self.value_width))
        return state_space(query, key, value, F.softplus(step.float() + bias), -rate.exp(), skip, rows).flatten(2)

    def normed(self, out: Tensor, gate: Tensor) -> Tensor:
        """Apply the gate, then normalize each group's heads together, in fp32."""
        gated = out.float() * F.silu(gate.float())
        weight = self.norm_weight.float().view(self.num_heads, -1)
        return (F.rms_norm(gated, gated.shape[-1:], None, self.config.layernorm_epsilon) * weight).to(out.dtype)
