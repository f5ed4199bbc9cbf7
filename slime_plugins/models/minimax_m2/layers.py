"""MiniMax-M2: queries and keys are normalized over all heads together, not per head.

    --spec slime_plugins.models.minimax_m2 get_minimax_m2_spec --qk-layernorm

The flags describe the rest of the decoder block: grouped-query attention with half of each head rotated, experts with
a biased sigmoid router, no shared expert.

Under tensor parallelism a rank has some of the heads, but the mean square is over all heads, so each norm all-reduces
one number per token in the forward and in the backward pass.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from typing import Any

from slime.backends.megatron_utils import cpu_platform  # noqa: F401

# isort: split
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import mpu
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from slime.backends.megatron_utils.layers.layer_specs import BlockSpec, get_block_spec
from slime.backends.megatron_utils.layers.norm import Norm
from slime.utils.errors import ConfigError


def get_minimax_m2_spec(args: Namespace, config: TransformerConfig, vp_stage: int | None = None) -> BlockSpec:
    """Return the layers of this pipeline stage.

    Args:
        args: complete flags; not read.
        config: built from ``args``.
        vp_stage: virtual pipeline stage on this rank.

    Raises:
        ConfigError: the flags describe another model.
    """
    check_stages(config)
    return get_block_spec(config, vp_stage, change=lambda layer, _: _norm_over_heads(layer, config))


get_minimax_m2_layer_spec = get_minimax_m2_spec
"""The name in upstream's commands."""


def check_stages(config: TransformerConfig, *_: Any) -> None:
    """Check that the flags describe this model, before any GPU is used.

    Raises:
        ConfigError: they do not.
    """
    hint = "source scripts/models/minimax-m2.sh."
    if config.multi_latent_attention:
        raise ConfigError(f"--multi-latent-attention is given; MiniMax-M2 has grouped-query attention; {hint}")
    if not config.qk_layernorm:
        raise ConfigError(f"--qk-layernorm is not given; MiniMax-M2 norms queries and keys; {hint}")
    if config.normalization != "RMSNorm":
        raise ConfigError(f"--normalization is {config.normalization}; MiniMax-M2 has RMSNorm; {hint}")
    if config.mtp_num_layers:
        raise ConfigError(
            f"--mtp-num-layers is {config.mtp_num_layers}; the MTP modules of which MiniMax-M2's config.json speaks "
            "(num_mtp_modules) are known neither here nor to SGLang; drop the flag."
        )


def _norm_over_heads(layer: ModuleSpec, config: TransformerConfig) -> ModuleSpec:
    """Replace both norms of the layer's attention."""
    attention = layer.submodules.self_attention
    norms = {
        "q_layernorm": ModuleSpec(module=AllHeadsNorm, params={"num_heads": config.num_attention_heads}),
        "k_layernorm": ModuleSpec(module=AllHeadsNorm, params={"num_heads": config.num_query_groups}),
    }
    attention = replace(attention, submodules=replace(attention.submodules, **norms))
    # On disk the norms have the names in upstream's checkpoints.
    names = {f"self_attention.{x}_layernorm.": f"self_attention.{x}_norm." for x in "qk"}
    keys_map = {**layer.submodules.sharded_state_dict_keys_map, **names}
    submodules = replace(layer.submodules, self_attention=attention, sharded_state_dict_keys_map=keys_map)
    return replace(layer, submodules=submodules)


class AllHeadsNorm(Norm):
    """RMSNorm over all heads of a token, of which a tensor-parallel rank has some.

    The weight is replicated, like that of any norm, and a rank uses the part of its heads: 7,168 numbers per layer are
    not worth sharding.  megatron-core sums the gradients of ``q_layernorm`` and ``k_layernorm``, by name, over the
    tensor-parallel group.  Each rank's gradient is zero outside of its part, so the sum is the gradient.  (With a
    sharded weight, the sum would mix the gradients of different heads.)  For the same reason more ranks than key heads
    need no special case: ranks that share a key head add the contributions of their query heads.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, *, num_heads: int, **_: Any
    ) -> None:
        """Args:
        config: as for the base class.
        hidden_size: head dimension.
        eps: added to the mean square.
        num_heads: number of heads in the whole model.
        """
        super().__init__(config, num_heads * hidden_size, eps)
        self.tp_group = mpu.get_tensor_model_parallel_group()

    def forward(self, x: Tensor) -> Tensor:
        """Return [tokens, batch, heads of this rank, head dimension], of that shape and dtype."""
        heads, width = x.shape[-2:]
        weight = self.weight.view(-1, width)
        if self.is_zero_centered:
            weight = weight.float() + 1.0
        if self.tp_group.size() == 1:
            return F.rms_norm(x.to(weight.dtype), weight.shape, weight, self.eps).to(x.dtype)
        copies = self.tp_group.size() * heads // weight.size(0)
        start = self.tp_group.rank() // copies * heads
        size = copies * self.weight.numel()
        return _SharedRmsNorm.apply(x, weight[start : start + heads], self.eps, size, self.tp_group)


class _SharedRmsNorm(torch.autograd.Function):
    """``x * r * weight`` with ``r = 1 / sqrt(mean of x^2 over all ranks + eps)``; saves x and r.

    With g = dy * weight, N the number of elements over all ranks and sums over all of them:

        dx = r g - r^3 x sum(g x) / N
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, size: int, group: dist.ProcessGroup) -> Tensor:
        """Args:
            x: [..., heads of this rank, head dimension], in any dtype; computed in fp32 at least.
            weight: [heads of this rank, head dimension]
            eps: added to the mean square.
            size: elements of a token over all ranks; each rank counts those of a shared head.
            group: the tensor-parallel ranks.

        Returns:
            a tensor with the shape and dtype of ``x``, rounded once, as in engines.
        """
        # Products of bf16 and fp32 are fp32, so x need not be copied to fp32.
        dtype = torch.promote_types(x.dtype, torch.float32)
        squares = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=dtype).square()
        dist.all_reduce(squares, group=group)
        inverse = torch.rsqrt(squares / size + eps)
        ctx.save_for_backward(x, weight, inverse)
        ctx.size, ctx.group = size, group
        return (x * inverse * weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return gradients of ``x`` and of this rank's part of the weight."""
        x, weight, inverse = ctx.saved_tensors
        (grad,) = grads
        normed = x * inverse
        weight_grad = (grad * normed).flatten(0, -3).sum(dim=0)
        scaled = grad * weight.to(inverse.dtype)
        along = (scaled * normed).sum(dim=(-2, -1), keepdim=True)
        # Each rank has its heads' contribution to the gradient of the common mean square.
        dist.all_reduce(along, group=ctx.group)
        x_grad = inverse * (scaled - normed * (along / ctx.size))
        return x_grad.to(x.dtype), weight_grad.to(weight.dtype), None, None, None
