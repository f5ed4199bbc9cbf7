"""The numbers that flags of Megatron may be: one table of types, by attribute.

A number that is in no row may be 0 or more: Megatron's sizes, counts, rates and factors have no sign.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from slime.flags.kinds import (
    any_float,
    any_int,
    byte_count,
    fraction,
    fraction_below_one,
    non_negative_float,
    non_negative_int,
    positive_float,
    positive_int,
)

_SIZES = """
    tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size expert_model_parallel_size
    expert_tensor_parallel_size virtual_pipeline_model_parallel_size num_virtual_stages_per_pipeline_rank
    num_layers_per_virtual_pipeline_stage decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers
    microbatch_group_size_per_vp_stage hierarchical_context_parallel_sizes num_distributed_optimizer_instances
    ffn_hidden_size num_query_groups kv_channels vocab_size seq_length
    make_vocab_size_divisible_by max_position_embeddings original_max_position_embeddings
    recompute_num_layers moe_ffn_hidden_size q_lora_rank kv_lora_rank qk_head_dim v_head_dim dsa_indexer_n_heads
    dsa_indexer_head_dim dsa_indexer_topk linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim
    linear_num_key_heads linear_num_value_heads lr_decay_iters lr_wsd_decay_iters
""".split()
_FACTORS = "rotary_base rotary_seq_len_interpolation_factor rope_scaling_factor softmax_scale".split()
_PROBABILITIES = "hidden_dropout attention_dropout rotary_percent optimizer_offload_fraction".split()
_MOMENTS = "adam_beta1 adam_beta2 lr_warmup_fraction".split()

RANGES: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys(_SIZES, positive_int),
    **dict.fromkeys(_FACTORS, positive_float),
    **dict.fromkeys(_PROBABILITIES, fraction),
    **dict.fromkeys(_MOMENTS, fraction_below_one),
    **dict.fromkeys(("ddp_bucket_size", "min_offloaded_tensor_size"), byte_count),
    "fp8_margin": any_int,
    "glu_linear_offset": any_float,
}
"""Attribute of args -> type of its flag, where it is not the default of numbers without a sign."""

_WITHOUT_SIGN: dict[type, Callable[[str], Any]] = {int: non_negative_int, float: non_negative_float}


def number_type(attribute: str, kind: type) -> Callable[[str], Any]:
    """Return the type of a flag that takes an ``int`` or a ``float``."""
    return RANGES.get(attribute, _WITHOUT_SIGN[kind])
