"""Config fields of megatron-core whose flags have no effect here.  They would change only speed or memory.

Many fields act only inside TransformerEngine's layers, which this trainer does not build.  A field that nothing reads
is listed here: its flag is reset, and a log line states what happens instead.  If ignoring a field would change
results or break a promise, it is not a flag (``config_flags.NOT_FLAGS``).  tests/contracts/test_megatron_fields.py
names the readers of all other fields.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from slime.backends.megatron_utils.flags.config_flags import (
    CONFIG_CLASSES,
    DEFAULTS,
    attribute_of,
    config_fields,
    default_of,
)
from slime.flags.group import flag_of

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
"""Field -> what happens instead."""


def reset_what_has_no_effect(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return defaults for those of ``flags``, attribute -> value, that are in :data:`WITHOUT_EFFECT`; log why."""
    derived: dict[str, Any] = {}
    words_of_reason: dict[str, list[str]] = {}
    moments = flags["exp_avg_dtype"], flags["exp_avg_sq_dtype"]
    is_precision_aware = flags["optimizer_cpu_offload"] or has_narrow_moments(*moments)
    for name, default in _given(flags):
        if name == "use_precision_aware_optimizer" and is_precision_aware:
            continue  # has an effect: see optimizer_config_from_args and the optimizer transforms
        attribute = attribute_of(name)
        derived[attribute] = default
        word = flag_of(f"no_{attribute}" if flags[attribute] is False else attribute)
        words_of_reason.setdefault(WITHOUT_EFFECT[name], []).append(word)
    for reason, words in words_of_reason.items():
        logger.info("%s: without effect here; %s.", ", ".join(words), reason)
    return derived


def has_narrow_moments(*dtypes: torch.dtype) -> bool:
    """Return True if one of Adam's moments is narrower than fp32."""
    return set(dtypes) != {torch.float32}


def _given(values: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return (field, default) of the fields in :data:`WITHOUT_EFFECT` whose flag differs from its default."""
    defaults: dict[str, Any] = {}
    for config_class in CONFIG_CLASSES:
        for field, _ in config_fields(config_class):
            if field.name in WITHOUT_EFFECT:
                # a field of several classes has the default of the first class
                defaults.setdefault(field.name, DEFAULTS.get(attribute_of(field.name), default_of(field)))
    return [(name, default) for name, default in defaults.items() if values[attribute_of(name)] != default]
