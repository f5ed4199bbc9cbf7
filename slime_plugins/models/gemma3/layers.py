"""The layers of Gemma 3, text: windows with separate rotary angles, an MLP gated by GELU, scaled embeddings.

    --spec slime_plugins.models.gemma3 get_gemma3_spec --post-self-attn-layernorm --post-mlp-layernorm --qk-layernorm
    --apply-layernorm-1p --swiglu --window-size 511,0 --window-attn-skip-freq 6

``--swiglu`` adds the MLP's gate.  The first layer multiplies the embedding's output by sqrt(hidden size): the
vocabulary projection, which shares the matrix, is not scaled.
"""

from __future__ import annotations

import copy
from argparse import Namespace
from dataclasses import replace
from functools import partial
from typing import Any

from slime.backends.megatron_utils import cpu_platform  # noqa: F401

# isort: split
import torch
import torch.nn.functional as F
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from slime.backends.megatron_utils.layers.attention import PackedSelfAttention
from slime.backends.megatron_utils.layers.layer_specs import BlockSpec, SandwichLayer, get_block_spec
from slime.utils.errors import ConfigError
from slime_plugins.models.gemma3.family import LOCAL_ROTARY_BASE


def get_gemma3_spec(args: Namespace, config: TransformerConfig, vp_stage: int | None = None) -> BlockSpec:
    """Return the layers of this pipeline stage.

    Args:
        args: complete flags; they select the norms after attention and MLP.
        config: ``window_size`` and ``window_attn_skip_freq`` determine which layers have a window.
        vp_stage: virtual pipeline stage on this rank.

    Raises:
        ConfigError: the flags describe another model.
    """
    has_post_norms = args.post_self_attn_layernorm and args.post_mlp_layernorm
    check_stages(config, args.hf_checkpoint, has_post_norms)
    change = partial(_gemma_layer, config)
    return get_block_spec(config, vp_stage, change, post_self_attn_layernorm=True, post_mlp_layernorm=True)


def check_stages(config: TransformerConfig, hf_checkpoint: str | None, has_post_norms: bool) -> None:
    """Check that the flags describe this model, before any GPU is used.

    Raises:
        ConfigError: they do not.
    """
    if config.window_size is None or not has_post_norms:
        raise ConfigError(
            "--window-size, --post-self-attn-layernorm or --post-mlp-layernorm is not given; Gemma 3 has all three; "
            "source scripts/models/gemma3-1B.sh."
        )


def _gemma_layer(config: TransformerConfig, layer: ModuleSpec, number: int) -> ModuleSpec:
    """Return layer ``number``, counted from 1, with the parts that only Gemma has."""
    attention = layer.submodules.self_attention
    if is_layer_window_attention(config.window_size, config.window_attn_skip_freq, number):
        params = {**attention.params, "rotary_base": LOCAL_ROTARY_BASE}
        attention = replace(attention, module=WindowAttention, params=params)
    mlp = replace(layer.submodules.mlp, module=GeluMlp)
    submodules = replace(layer.submodules, self_attention=attention, mlp=mlp)
    return replace(layer, module=FirstLayer if number == 1 else SandwichLayer, submodules=submodules)


class WindowAttention(PackedSelfAttention):
    """Attention of a layer with a window: its rotary angles have a separate base and are never stretched."""

    tables_name = "window_rotary_tables"

    def __init__(self, config: TransformerConfig, *args: Any, rotary_base: float, **options: Any) -> None:
        """Build with megatron-core's arguments for attention, and the base of the rotary angles."""
        own = copy.copy(config)
        own.yarn_rotary_scaling_factor = 1.0  # YaRN would also scale cos and sin
        super().__init__(own, *args, **options)
        self.rotary_base = rotary_base

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        *args: Any,
        rotary_pos_emb: Any = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend with separate rotary angles, for as many positions as the model's angles."""
        given = rotary_pos_emb[0] if isinstance(rotary_pos_emb, tuple) else rotary_pos_emb
        own = None if given is None else window_angles(given, self.rotary_base)
        return super().forward(hidden_states, attention_mask, *args, rotary_pos_emb=own, **options)


def window_angles(angles: Tensor, base: float) -> Tensor:
    """Return angles by position for the layers with a window.

    Args:
        angles: angles of the other layers, [positions, 1, 1, head dimension]; only the shape and device are used.
        base: base of the rotary frequencies.

    Returns:
        fp32 angles of the same shape, each angle twice, in two halves.
    """
    return plain_angles(angles.size(0), angles.size(-1), base, device=angles.device)


def plain_angles(
    num_positions: int, width: int, base: float, *, num_turning: int | None = None, device: torch.device | None = None
) -> Tensor:
    """Return fp32 angles [positions, 1, 1, head dimension], each twice, in two halves.

    Args:
        width: head dimension.
        base: base of the rotary frequencies.
        num_turning: number of dimension pairs to rotate, the first ones; None for all.
    """
    frequencies = base ** -(torch.arange(0, width, 2, dtype=torch.float32, device=device) / width)
    if num_turning is not None:
        frequencies[num_turning:] = 0.0
    half = torch.outer(torch.arange(num_positions, dtype=torch.float32, device=device), frequencies)
    return torch.cat([half, half], dim=-1)[:, None, None]


class GeluMlp(MLP):
    """Gated MLP with GELU, approximated by tanh."""

    def __init__(
        self, config: TransformerConfig, *args: Any, ffn_hidden_size: int | None = None, **options: Any
    ) -> None:
        """Build with megatron-core's arguments for an MLP; ``ffn_hidden_size`` overrides the config's width."""
        own = copy.copy(config)
        own.activation_func, own.bias_activation_fusion = gelu, False
        own.ffn_hidden_size = ffn_hidden_size or config.ffn_hidden_size
        super().__init__(own, *args, ffn_hidden_size=own.ffn_hidden_size, **options)


def gelu(x: Tensor) -> Tensor:
    """Return GELU, approximated by tanh."""
    return F.gelu(x, approximate="tanh")


class FirstLayer(SandwichLayer):
    """The first layer, which scales the embedding."""

    def forward(self, hidden_states: Tensor, *args: Any, **options: Any) -> Any:
        """Scale the embedding by sqrt(hidden size), rounded to its dtype, and run the layer."""
        scale = torch.tensor(self.config.hidden_size**0.5, dtype=hidden_states.dtype)
        return super().forward(hidden_states * scale.to(hidden_states.device), *args, **options)
