"""The layers of Nemotron-H and Nemotron 3: each is one mixer (Mamba-2, attention, an MLP or experts).

    --spec slime_plugins.models.nemotron_h get_nemotron_h_spec

The kinds of layers come from the config.json of ``--hf-checkpoint``, or from the flags; the sizes of Mamba-2 are the
flags of linear attention (its groups are key heads).  Attention has no positions; MLPs have no gate, and square the
output of ReLU.

mamba2.py        the layer, in every parallel layout
state_space.py   the recurrence, chunk by chunk in plain torch, or by the kernel of ``mamba-ssm``
"""

from __future__ import annotations

import copy
from argparse import Namespace
from dataclasses import replace
from typing import Any

from slime.backends.megatron_utils import cpu_platform  # noqa: F401

# isort: split
from megatron.core.activations import squared_relu
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from slime.backends.megatron_utils.flags.hf_config_check import read_hf_config
from slime.backends.megatron_utils.layers.layer_specs import BlockSpec, RoutedExperts, get_block_spec
from slime.utils.errors import ConfigError
from slime_plugins.models.nemotron_h.family import kinds_of_run, layer_kinds
from slime_plugins.models.nemotron_h.mamba2 import Mamba2
from slime_plugins.models.qwen3_next.layers import check_linear_attention, with_delta_net

__all__ = ["check_stages", "get_nemotron_h_spec"]


def get_nemotron_h_spec(args: Namespace, config: TransformerConfig, vp_stage: int | None = None) -> BlockSpec:
    """Return the layers of this pipeline stage.

    Args:
        args: ``hf_checkpoint`` is read.
        config: made from them.
        vp_stage: which virtual stage of this rank.

    Raises:
        ConfigError: the flags describe another model.
    """
    kinds = _kinds(config, args.hf_checkpoint)
    return get_block_spec(config, vp_stage, lambda layer, number: _one_mixer(layer, kinds[number - 1]))


def check_stages(config: TransformerConfig, hf_checkpoint: str | None, *_: Any) -> None:
    """Check the flags before any GPU is used.

    Raises:
        ConfigError: they describe another model, or request MTP layers.
    """
    if config.linear_attention_freq is not None:
        check_linear_attention(config)
    if config.mtp_num_layers:
        raise ConfigError(
            f"--mtp-num-layers is {config.mtp_num_layers}; the MTP layers of Nemotron 3 are not computed here, as in "
            "transformers; exports and engines keep those of --hf-checkpoint. Drop the flag."
        )
    _kinds(config, hf_checkpoint)


def _kinds(config: TransformerConfig, hf_checkpoint: str | None) -> list[str]:
    is_mamba = config.linear_attention_freq
    is_moe = config.moe_layer_freq if config.num_moe_experts else [0] * config.num_layers
    hf_config = read_hf_config(hf_checkpoint) if hf_checkpoint else None
    is_listed = isinstance(is_mamba, list) and isinstance(is_moe, list)
    if not is_listed and not layer_kinds(hf_config or {}):
        raise ConfigError(
            f"--linear-attention-freq is {is_mamba} and --moe-layer-freq {is_moe}; for a nemotron_h both are lists of "
            "0 and 1 for each layer; give them so, or --hf-checkpoint."
        )
    kinds = kinds_of_run(hf_config, is_mamba, is_moe)
    if len(kinds) != config.num_layers:
        raise ConfigError(
            f"--num-layers is {config.num_layers}; config.json of --hf-checkpoint {hf_checkpoint} has "
            f"{len(kinds)} layers (hybrid_override_pattern, or layers_block_type)."
        )
    return kinds


def _one_mixer(layer: ModuleSpec, kind: str) -> ModuleSpec:
    """Return the layer with only one of its two halves."""
    if kind == "mamba":
        layer = with_delta_net(layer, Mamba2)
    if kind in ("mamba", "attention"):
        parts: dict[str, Any] = {"pre_mlp_layernorm": IdentityOp, "mlp": IdentityOp, "mlp_bda": IdentityFuncOp}
    else:
        mlp = layer.submodules.mlp
        mlp = SquaredReluExperts if kind == "moe" else replace(mlp, module=SquaredReluMlp)
        parts = {"input_layernorm": IdentityOp, "self_attention": IdentityOp, "self_attn_bda": IdentityFuncOp}
        parts["mlp"] = mlp
    return replace(layer, submodules=replace(layer.submodules, **parts))


class SquaredReluMlp(MLP):
    """MLP without a gate: ``relu(x W)^2 V``."""

    def __init__(self, config: TransformerConfig, *args: Any, **options: Any) -> None:
        """Take what megatron-core passes to any MLP."""
        super().__init__(_with_squared_relu(config), *args, **options)


class SquaredReluExperts(RoutedExperts):
    """Routed experts and a shared expert, without gates."""

    def __init__(self, config: TransformerConfig, *args: Any, **options: Any) -> None:
        """Take what megatron-core passes to any experts."""
        super().__init__(_with_squared_relu(config), *args, **options)


def _with_squared_relu(config: TransformerConfig) -> TransformerConfig:
    own = copy.copy(config)
    own.activation_func, own.bias_activation_fusion = squared_relu, False
    return own
