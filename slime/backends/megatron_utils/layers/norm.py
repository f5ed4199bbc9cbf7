"""RMSNorm and LayerNorm with and without CUDA, under sequence parallelism and with a zero-centered weight.

megatron-core's torch norm supports neither of the last two, and its fused norms need TransformerEngine or Apex.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from slime.backends.megatron_utils import cpu_platform
from slime.utils.errors import ConfigError


class Norm(torch.nn.Module):
    """Normalizes the last dimension in fp32 and returns the input's dtype.

    With ``--apply-layernorm-1p`` the stored weight is the weight minus one.  Under sequence parallelism each rank sees
    a slice of the tokens, so the parameters are marked for the gradient all-reduce over the tensor-parallel group.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        """Create the parameters.

        Raises:
            ConfigError: ``--normalization`` is neither RMSNorm nor LayerNorm.
        """
        super().__init__()
        if config.normalization not in ("RMSNorm", "LayerNorm"):
            raise ConfigError(f"--normalization is {config.normalization!r}; it must be RMSNorm or LayerNorm.")
        self.shape = (hidden_size,)
        self.eps = eps
        self.is_zero_centered = config.layernorm_zero_centered_gamma
        factory = cpu_platform.of_new_parameters(config)
        initial = torch.zeros if self.is_zero_centered else torch.ones
        self.weight = torch.nn.Parameter(initial(hidden_size, **factory))
        self.bias: torch.nn.Parameter | None = None
        if config.normalization == "LayerNorm":
            self.bias = torch.nn.Parameter(torch.zeros(hidden_size, **factory))
        for parameter in self.parameters():
            vars(parameter)["sequence_parallel"] = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x / rms(x) * weight`` or ``(x - mean) / std * weight + bias``, in the shape and dtype of ``x``."""
        if not self.is_zero_centered:
            if self.bias is None:
                return F.rms_norm(x.to(self.weight.dtype), self.shape, self.weight, self.eps).to(x.dtype)
            return F.layer_norm(x.to(self.weight.dtype), self.shape, self.weight, self.bias, self.eps).to(x.dtype)
        # 1 + weight would round in bf16, so the sum and the product are computed in fp32.
        weight = self.weight.float() + 1.0
        if self.bias is None:
            return F.rms_norm(x.float(), self.shape, weight, self.eps).to(x.dtype)
        return F.layer_norm(x.float(), self.shape, weight, self.bias.float(), self.eps).to(x.dtype)
