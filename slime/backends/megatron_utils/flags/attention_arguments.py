"""Flags of attention that only some families have: DeepSeek's sparse attention (GLM-5, GLM-5.2, DeepSeek-V3.2), and
linear attention, a gated delta net.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from slime.backends.megatron_utils.flags.config_flags import flag_of
from slime.backends.megatron_utils.models import FAMILIES, family_of
from slime.utils.errors import ConfigError

_SPARSE = {f.sparse_architecture: f for f in FAMILIES.values() if f.sparse_architecture}
"""Families with sparse attention, which works over gathered, contiguous context-parallel parts, by architecture."""


def has_indexer(config: dict[str, Any]) -> bool:
    """Return True when a config.json is that of a model with sparse attention."""
    family = family_of(config)
    return family is not None and bool(family.sparse_architecture)


def check_sparse_flags(args: Namespace) -> None:
    """Refuse megatron-core's own experiments with sparse attention, which would change nothing here.

    Raises:
        ConfigError: names the flag.
    """
    if args.experimental_attention_variant is not None:
        raise ConfigError(
            f"--experimental-attention-variant is {args.experimental_attention_variant!r}, which the layers here do "
            f"not have; for sparse attention give --spec {' or '.join(sorted({f.spec for f in _SPARSE.values()}))}."
        )
    for attribute in ("dsa_indexer_loss_coeff", "dsa_indexer_use_sparse_loss"):
        if vars(args)[attribute]:
            raise ConfigError(
                f"{flag_of(attribute)} is {vars(args)[attribute]}; the indexer is not trained: the choice of keys has "
                "no gradient. Leave the flag out."
            )


def sparse_problems(args: Namespace, config: dict[str, Any]) -> Iterator[str]:
    """Yield what does not go with the HF config: a frozen indexer that is not there, a wrong cut of the stream."""
    if args.freeze_indexer and not (has_indexer(config) or args.spec or args.custom_model_provider_path):
        yield (
            f"--freeze-indexer: the checkpoint, a {config.get('model_type')}, has no sparse attention and so no "
            "indexer; drop the flag."
        )
    if args.context_parallel_size == 1:
        return
    architectures = config.get("architectures") or []
    is_sparse = bool(set(architectures) & set(_SPARSE))
    if args.allgather_cp and not is_sparse:
        yield (
            f"--allgather-cp with --context-parallel-size {args.context_parallel_size}: the checkpoint is "
            f"{', '.join(architectures) or 'of unknown architecture'}; only {' and '.join(sorted(_SPARSE))} work "
            "that way; drop --allgather-cp."
        )
    if is_sparse and not args.allgather_cp:
        yield (
            f"--context-parallel-size is {args.context_parallel_size} without --allgather-cp; the sparse attention of "
            f"{', '.join(architectures)} needs contiguous parts of the stream; give --allgather-cp."
        )


_SIZES = {
    # attribute of args -> default of megatron-core's flag
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}


def check_linear_flags(args: Namespace) -> None:
    """Refuse sizes that cannot be cut, and flags that no layer would follow.

    Raises:
        ConfigError: names the flags.
    """
    if args.attention_output_gate and args.tensor_model_parallel_size > args.num_query_groups:
        raise ConfigError(
            f"--tensor-model-parallel-size is {args.tensor_model_parallel_size} with --attention-output-gate and "
            f"--num-query-groups {args.num_query_groups}; megatron-core does not cut the gates of one group over "
            f"ranks; use at most {args.num_query_groups}, and more of --context-parallel-size or pipeline stages."
        )
    frequency = args.linear_attention_freq
    if frequency is None:
        changed = [flag_of(key) for key, default in _SIZES.items() if vars(args)[key] != default]
        if changed:
            raise ConfigError(
                f"{', '.join(changed)} without --linear-attention-freq: no layer has linear attention; give it too."
            )
        return
    if not args.spec and not args.custom_model_provider_path:
        raise ConfigError(
            f"--linear-attention-freq is {frequency} without --spec; the standard layers have no linear attention; "
            f"give --spec {' or '.join(sorted({f.spec for f in FAMILIES.values() if f.has_linear_attention}))}."
        )
    if (args.mtp_num_layers or 0) > 1:
        raise ConfigError(
            f"--mtp-num-layers is {args.mtp_num_layers}; a model with linear attention has one MTP layer; give 1."
        )
    is_short = isinstance(frequency, int) and frequency < 1
    if is_short or (not isinstance(frequency, int) and len(frequency) != args.num_layers):
        raise ConfigError(
            f"--linear-attention-freq is {frequency}; it must be at least 1, or a list with 1 (linear) or 0 for each "
            f"of the {args.num_layers} layers."
        )
    key_heads, value_heads = args.linear_num_key_heads, args.linear_num_value_heads
    if value_heads % key_heads:
        raise ConfigError(
            f"--linear-num-value-heads is {value_heads}; --linear-num-key-heads {key_heads} must divide it."
        )
    tensor, context = args.tensor_model_parallel_size, args.context_parallel_size
    if key_heads % (tensor * context):
        raise ConfigError(
            f"--linear-num-key-heads is {key_heads}; linear attention distributes its key heads over --tensor-model-"
            f"parallel-size {tensor} x --context-parallel-size {context} = {tensor * context} ranks, which must "
            "divide them; lower one of the two."
        )
