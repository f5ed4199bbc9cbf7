"""The layers of Qwen3-Next: a gated delta net in three of four, attention with an output gate in the fourth.

    --spec slime_plugins.models.qwen3_next get_qwen3_next_spec --attention-output-gate --apply-layernorm-1p

The kind of attention of each layer and the sizes of the delta nets are megatron-core's own fields, which slime fills
from the config.json of ``--hf-checkpoint``; the flags describe the rest of the decoder block, including the layer
inside of an MTP layer.

gated_delta_net.py   linear attention by the gated delta rule, in every parallel layout
delta_rule.py        the rule itself, chunk by chunk in plain torch, or by the kernels of ``fla``
packed_rows.py       index tensors of packed sequences: chunks, and the input of the convolution
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from typing import Any

from slime.backends.megatron_utils import cpu_platform  # noqa: F401

# isort: split
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from slime.backends.megatron_utils.flags.model_dims import linear_layers
from slime.backends.megatron_utils.layers.layer_specs import BlockSpec, get_block_spec
from slime.utils.errors import ConfigError
from slime_plugins.models.qwen3_next.gated_delta_net import GatedDeltaNet, gated_delta_net_spec

__all__ = ["check_stages", "get_qwen3_next_spec"]


def get_qwen3_next_spec(args: Namespace, config: TransformerConfig, vp_stage: int | None = None) -> BlockSpec:
    """Return the layers of this pipeline stage.

    Args:
        args: not read; part of the ``--spec`` signature.
        config: ``linear_attention_freq`` determines which layers have linear attention.
        vp_stage: virtual pipeline stage on this rank.

    Raises:
        ConfigError: ``linear_attention_freq`` is not set.
    """
    check_stages(config)
    is_linear = linear_layers(config.linear_attention_freq, config.num_layers)

    def change(layer: ModuleSpec, number: int) -> ModuleSpec:
        return with_delta_net(layer) if is_linear[number - 1] else layer

    return get_block_spec(config, vp_stage, change)


def check_stages(config: TransformerConfig, *_: Any) -> None:
    """Check the flags before any GPU is used.

    Raises:
        ConfigError: it is not known which layers have linear attention, or their sizes are inconsistent.
    """
    if config.linear_attention_freq is None:
        raise ConfigError(
            "--linear-attention-freq is not given, and no --hf-checkpoint whose config.json says which layers have "
            "linear attention; give one of them."
        )
    check_linear_attention(config)


def check_linear_attention(config: TransformerConfig) -> None:
    """Check that the sizes of linear attention are consistent and can be sharded.

    Raises:
        ConfigError: names the flag, its value and what is allowed.
    """
    if (config.mtp_num_layers or 0) > 1:
        raise ConfigError(
            f"--mtp-num-layers is {config.mtp_num_layers}; a model with linear attention has one MTP layer; give 1."
        )
    key_heads, value_heads = config.linear_num_key_heads, config.linear_num_value_heads
    if value_heads % key_heads:
        raise ConfigError(
            f"--linear-num-value-heads is {value_heads}; --linear-num-key-heads {key_heads} must divide it."
        )
    tensor, context = config.tensor_model_parallel_size, config.context_parallel_size
    if key_heads % (tensor * context):
        raise ConfigError(
            f"--linear-num-key-heads is {key_heads}; linear attention distributes its key heads over --tensor-model-"
            f"parallel-size {tensor} x --context-parallel-size {context} = {tensor * context} ranks, which must "
            "divide them; lower one of the two."
        )


def with_delta_net(layer: ModuleSpec, module: type[GatedDeltaNet] = GatedDeltaNet) -> ModuleSpec:
    """Return the layer with its attention replaced by linear attention."""
    names = dict(layer.submodules.sharded_state_dict_keys_map)
    # On disk the norm belongs to the projection that follows, as in TransformerEngine.
    names["input_layernorm."] = "self_attention.in_proj.layer_norm_"
    parts = replace(layer.submodules, self_attention=gated_delta_net_spec(module), sharded_state_dict_keys_map=names)
    return replace(layer, submodules=parts)
