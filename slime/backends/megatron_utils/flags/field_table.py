"""Config fields of megatron-core that are flags and that nobody reads here: what happens to them instead.

A field can be set and read by nobody: large parts of megatron-core act only inside TransformerEngine's layers,
Megatron-FSDP, inference or Mamba, none of which this trainer builds.  Accepting such a flag in silence would be a lie,
so each field that has no reader is listed in one of two tables:

* :data:`WITHOUT_EFFECT`: only speed or memory would differ; the flag is reset and one log line says what happens,
* :data:`REFUSED`: results or promises would differ; an error.

tests/contracts/test_megatron_fields.py names the module that reads each of the others.  TransformerEngine being
installed changes nothing here: the layers are slime's own (what megatron-core itself takes from it, such as its fused
Adam, needs no flag).
"""

from __future__ import annotations

import logging
from argparse import Namespace
from typing import Any

import torch

from slime.backends.megatron_utils.flags.config_flags import (
    CONFIG_CLASSES,
    DEFAULTS,
    attribute_of,
    config_fields,
    default_of,
)
from slime.utils.errors import ConfigError

logger = logging.getLogger(__name__)

_PRECISION = "main parameters are fp32; --optimizer-cpu-offload keeps them on the host"

WITHOUT_EFFECT: dict[str, str] = {
    "moe_permute_fusion": "tokens are moved by gathers of slime's own",
    "moe_use_legacy_grouped_gemm": "experts are grouped by torch's own product (--moe-grouped-gemm)",
    "moe_router_fusion": "the router is plain torch",
    "apply_rope_fusion": "rotary embeddings are slime's own",
    "fused_single_qkv_rope": "rotary embeddings are slime's own",
    "gradient_accumulation_fusion": "gradients are accumulated by plain torch",
    "persist_layer_norm": "the norm is slime's own",
    "memory_efficient_layer_norm": "the norm is slime's own",
    "masked_softmax_fusion": "attention is slime's own",
    "attention_softmax_in_fp32": "the softmax of attention is always computed in fp32",
    "cp_comm_type": "context-parallel ranks gather keys and values",
    "cross_entropy_loss_fusion": "log-probs have kernels of slime's own",
    "cross_entropy_fusion_impl": "log-probs have kernels of slime's own",
    "use_te_rng_tracker": "random states are Megatron's own",
    "use_te_activation_func": "activations are plain torch",
    "barrier_with_L1_time": "there are no Megatron timers, so there is nothing to wait for",
    **dict.fromkeys(
        (
            *("tp_comm_overlap", "tp_comm_bulk_wgrad", "tp_comm_bulk_dgrad", "tp_comm_overlap_ag"),
            *("tp_comm_overlap_rs", "tp_comm_overlap_rs_dgrad", "tp_comm_split_ag", "tp_comm_atomic_ag"),
            *("tp_comm_split_rs", "tp_comm_atomic_rs", "tp_comm_overlap_disable_qkv"),
            *("tp_comm_overlap_disable_fc1", "tp_comm_bootstrap_backend"),
        ),
        "tensor-parallel communication is not overlapped with matrix products",
    ),
    "use_precision_aware_optimizer": "Adam's moments are fp32 unless --exp-avg-dtype or --exp-avg-sq-dtype is given",
    **dict.fromkeys(("store_param_remainders", "main_grads_dtype", "main_params_dtype"), _PRECISION),
    **dict.fromkeys(
        (
            *("fp8_margin", "fp8_interval", "fp8_amax_history_len", "fp8_amax_compute_algo", "tp_only_amax_red"),
            *("fp8_dot_product_attention", "fp8_multi_head_attention", "fp4_recipe"),
        ),
        "FP8 scales are those of the current tensors, and attention itself is not quantized",
    ),
    **dict.fromkeys(
        ("fp8_param", "fp8_param_gather"),
        "parameters are kept and gathered in their own dtype, and quantized for each product: the same numbers",
    ),
}
"""Field -> what happens instead of what its flag asks for."""

REFUSED: dict[str, str] = {
    **dict.fromkeys(
        (
            *("fp8_wgrad", "fp8_quantizer_factory", "fp4", "fp4_param", "fp4_quantizer_factory"),
            *("use_kitchen", "use_kitchen_attention", "kitchen_attention_backend"),
            *("disable_parameter_transpose_cache", "reuse_grad_buf_for_mxfp8_param_ag"),
            *("moe_router_padding_for_quantization", "moe_router_padding_for_fp8"),
        ),
        "it belongs to TransformerEngine's layers, which slime has not",
    ),
    **dict.fromkeys(
        (
            *("cpu_offloading", "cpu_offloading_num_layers", "cpu_offloading_activations", "cpu_offloading_weights"),
            *("cpu_offloading_double_buffering", "fine_grained_activation_offloading", "offload_modules"),
            "min_offloaded_tensor_size",
        ),
        "offloading of activations needs TransformerEngine's layers; use --recompute-granularity",
    ),
    **dict.fromkeys(
        (
            *("delay_wgrad_compute", "ep_overlap_early_attn_memory_release", "defer_embedding_wgrad_compute"),
            "wgrad_deferral_limit",
        ),
        "delayed weight gradients need TransformerEngine's layers",
    ),
    **dict.fromkeys(("qk_clip_alpha", "qk_clip_threshold"), "packed attention does not clip its logits"),
    **dict.fromkeys(
        ("max_seqlen_per_dp_cp_rank", "hybrid_context_parallel"),
        "micro-batches are packed by --max-tokens-per-gpu, for one context-parallel size",
    ),
    "pipeline_model_parallel_comm_backend": "pipeline stages use the backend of all other groups",
    "num_microbatches_with_partial_activation_checkpoints": "a layer recomputes in every micro-batch or in none; "
    "--recompute-method block with --recompute-num-layers chooses the layers",
    "overlap_moe_expert_parallel_comm": "its schedule takes layers of TransformerEngine apart",
    "use_ring_exchange_p2p": "it needs a torch of NVIDIA's own",
    "apply_residual_connection_post_layernorm": "the layers take the residual before the norm",
    "qk_l2_norm": "there is no such norm of queries and keys; --qk-layernorm is the learned one",
    "apply_query_key_layer_scaling": "packed attention scales all layers alike",
    "disable_bf16_reduced_precision_matmul": "nobody acts on it",
    "init_model_with_meta_device": "parameters are made where they stay",
    "use_fused_weighted_squared_relu": "experts are gated by SiLU or GELU",
    "batch_invariant_mode": "there are no batch-invariant kernels here",
    "moe_enable_routing_replay": "slime has its own: --use-routing-replay",
    "moe_per_layer_logging": "the balancing losses are not logged by layer",
    "moe_latent_size": "experts work on the whole hidden size",
    "log_num_zeros_in_grad": "zeros are not counted",
    "gradient_reduce_div_fusion": "it is a choice of Megatron-FSDP",
}
"""Field -> why its flag cannot be given."""


def reset_what_has_no_effect(args: Namespace) -> dict[str, Any]:
    """Return defaults for the given flags of :data:`WITHOUT_EFFECT`; log one line for each reason."""
    derived: dict[str, Any] = {}
    flags_of_reason: dict[str, list[str]] = {}
    for name, default in _given(args):
        if name == "use_precision_aware_optimizer" and (args.optimizer_cpu_offload or has_narrow_moments(args)):
            continue  # has its effect: see optimizer_config_from_args and choose_adam
        if name in WITHOUT_EFFECT:
            derived[attribute_of(name)] = default
            flags_of_reason.setdefault(WITHOUT_EFFECT[name], []).append(_flag(args, name))
    for reason, flags in flags_of_reason.items():
        logger.info("%s: without effect here; %s.", ", ".join(flags), reason)
    return derived


def has_narrow_moments(args: Namespace) -> bool:
    """Return True when one of Adam's moments is kept in less than fp32."""
    return {args.exp_avg_dtype, args.exp_avg_sq_dtype} != {torch.float32}


def refuse_what_nobody_reads(args: Namespace) -> None:
    """Raise for flags of :data:`REFUSED` that were given.

    Raises:
        ConfigError: one line for each.
    """
    lines = [
        f"{_flag(args, name)} is given: {REFUSED[name]}; leave it out." for name, _ in _given(args) if name in REFUSED
    ]
    if lines:
        raise ConfigError("\n".join(lines))


def _given(args: Namespace) -> list[tuple[str, Any]]:
    """Return fields of the two tables whose flag has another value than its default, with the default."""
    defaults: dict[str, Any] = {}
    for config_class in CONFIG_CLASSES:
        for field, _ in config_fields(config_class):
            if field.name in WITHOUT_EFFECT or field.name in REFUSED:
                # where several classes have the field, its flag has the default of the first
                defaults.setdefault(field.name, DEFAULTS.get(attribute_of(field.name), default_of(field)))
    return [(name, default) for name, default in defaults.items() if vars(args)[attribute_of(name)] != default]


def _flag(args: Namespace, name: str) -> str:
    """Return the flag as it was meant: with ``--no-`` where a switch that is on was turned off."""
    word = attribute_of(name).replace("_", "-")
    return f"--no-{word}" if vars(args)[attribute_of(name)] is False else f"--{word}"
