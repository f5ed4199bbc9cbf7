"""Flags of linear attention, a gated delta net: sizes that cannot be cut, and flags that no layer would follow."""

from __future__ import annotations

from argparse import Namespace

from slime.backends.megatron_utils.flags.config_flags import flag_of
from slime.backends.megatron_utils.models import FAMILIES
from slime.utils.errors import ConfigError

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
