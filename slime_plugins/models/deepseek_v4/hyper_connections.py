"""Manifold-constrained hyper-connections: several residual streams in place of one (arXiv 2512.24880).

    x        = sum over streams of before[i] * stream[i]                 input of attention or experts
    stream'  = after[i] * f(x) + sum over j of mix[j, i] * stream[j]     mix doubly stochastic

All three come from one projection of the normalized streams.

Shapes: t = tokens of this rank, m = streams, h = hidden size.
"""

from __future__ import annotations

from slime.backends.megatron_utils import cpu_platform

# isort: split
import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class _Streams(torch.nn.Module):
    """Projects the normalized streams of every token, in fp32."""

    def __init__(self, config: TransformerConfig, *, num_streams: int, out: int, num_scales: int, eps: float) -> None:
        super().__init__()
        self.norm_eps, self.eps, self.num_streams = config.layernorm_epsilon, eps, num_streams
        factory = cpu_platform.of_new_parameters(config)
        self.fn = torch.nn.Parameter(torch.empty(out, num_streams * config.hidden_size, **factory))
        self.base = torch.nn.Parameter(torch.zeros(out, **factory))
        self.scale = torch.nn.Parameter(torch.ones(num_scales, **factory))
        if config.perform_initialization:
            config.init_method(self.fn)
        for parameter in self.parameters():
            vars(parameter)["sequence_parallel"] = config.sequence_parallel

    def projected(self, streams: Tensor) -> Tensor:
        """Map [t, 1, m, h] to [t, 1, out], fp32."""
        flat = streams.flatten(-2)
        flat = flat.to(torch.promote_types(flat.dtype, torch.float32))
        normed = F.rms_norm(flat, flat.shape[-1:], eps=self.norm_eps)
        return F.linear(normed, self.fn.to(normed.dtype))

    def joined(self, streams: Tensor, logits: Tensor) -> Tensor:
        """Return [t, 1, h]: streams [t, 1, m, h] weighted by the sigmoid of logits [t, 1, m]."""
        weight = torch.sigmoid(logits) + self.eps
        return (weight.unsqueeze(-1) * streams).sum(dim=-2).to(streams.dtype)


class HyperConnection(_Streams):
    """Computes the input of half a layer (attention or experts) from the streams, and how its output is added."""

    def __init__(self, config: TransformerConfig, *, num_streams: int, steps: int, eps: float) -> None:
        """Create the projection; ``steps`` is the number of times that rows and columns are normalized."""
        super().__init__(config, num_streams=num_streams, out=(2 + num_streams) * num_streams, num_scales=3, eps=eps)
        self.steps = steps

    def forward(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Map streams [t, 1, m, h] to the input [t, 1, h], to ``after`` [t, 1, m] and ``mix`` [t, 1, m, m], fp32."""
        count = self.num_streams
        sizes = [count, count, count * count]
        parts = zip(self.projected(streams).split(sizes, dim=-1), self.scale, self.base.split(sizes), strict=True)
        before, after, mix = (x * scale + base for x, scale, base in parts)
        mix = mix.unflatten(-1, (count, count)).softmax(dim=-1) + self.eps
        mix = mix / (mix.sum(dim=-2, keepdim=True) + self.eps)
        for _ in range(self.steps - 1):
            mix = mix / (mix.sum(dim=-1, keepdim=True) + self.eps)
            mix = mix / (mix.sum(dim=-2, keepdim=True) + self.eps)
        return self.joined(streams, before), 2 * torch.sigmoid(after), mix


def add_output(streams: Tensor, output: Tensor, after: Tensor, mix: Tensor) -> Tensor:
    """Return the streams [t, 1, m, h] after half a layer has returned ``output`` [t, 1, h]."""
    mixed = torch.matmul(mix.to(streams.dtype).transpose(-1, -2), streams)
    return after.to(streams.dtype).unsqueeze(-1) * output.unsqueeze(-2) + mixed


class StreamHead(_Streams):
    """Joins the streams before the final norm."""

    def __init__(self, config: TransformerConfig, *, num_streams: int, eps: float) -> None:
        super().__init__(config, num_streams=num_streams, out=num_streams, num_scales=1, eps=eps)

    def forward(self, streams: Tensor) -> Tensor:
        """Map [t, 1, m, h] to [t, 1, h]."""
        return self.joined(streams, self.projected(streams) * self.scale + self.base)
