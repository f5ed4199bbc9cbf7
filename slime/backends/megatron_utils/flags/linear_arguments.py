"""Flags of families in which some layers have linear attention, a gated delta net, against the HF config.

Which layers, and their sizes, come from config.json of ``--hf-checkpoint``; they are filled in under megatron-core's
own flags, so that a checkpoint records them and a plan reads them.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from slime.backends.megatron_utils.flags.config_flags import flag_of
from slime.backends.megatron_utils.flags.model_dims import linear_layers
from slime.backends.megatron_utils.models import FAMILIES, family_of
from slime.utils.errors import ConfigError

_SIZES = {
    # key of config.json and attribute of args -> default of megatron-core's flag
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}


def hf_linear_layers(config: dict[str, Any], num_layers: int) -> tuple[bool, ...]:
    """Return for each layer whether its attention is linear, by config.json: a type for each layer, or an interval."""
    types = config.get("layer_types")
    if types is not None:
        return tuple(kind == "linear_attention" for kind in types)
    return linear_layers(int(config["full_attention_interval"]), num_layers)


def derive_linear(args: Namespace, config: dict[str, Any] | None) -> dict[str, Any]:
    """Return what was not given of linear attention; ``--use-gated-attention`` is another name for its gate.

    Raises:
        ConfigError: a flag says something else than the HF config.
    """
    derived: dict[str, Any] = {"attention_output_gate": args.attention_output_gate or args.use_gated_attention}
    family = family_of(config or {})
    if not config or family is None or not family.has_linear_attention:
        return derived
    config = family.with_defaults(config)
    for key, default in _SIZES.items():
        given, expected = vars(args)[key], int(config[key])
        if given not in (default, expected):
            raise ConfigError(
                f"{flag_of(key)} is {given}; config.json of --hf-checkpoint says {expected}; leave the flag out."
            )
        derived[key] = expected
    expected_layers = hf_linear_layers(config, args.num_layers)
    if args.linear_attention_freq is None:
        derived["linear_attention_freq"] = [int(is_linear) for is_linear in expected_layers]
    elif linear_layers(args.linear_attention_freq, args.num_layers) != expected_layers:
        raise ConfigError(
            f"--linear-attention-freq is {args.linear_attention_freq}; in config.json of --hf-checkpoint the layers "
            f"with full attention are {[i for i, linear in enumerate(expected_layers) if not linear]} (from 0); leave "
            "the flag out."
        )
    return derived


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


def linear_problems(args: Namespace, config: dict[str, Any]) -> Iterator[str]:
    """Yield what does not go with the HF config: a missing gate, other norms."""
    family = family_of(config)
    if family is None or not family.has_linear_attention or args.custom_model_provider_path:
        return
    kind = config["model_type"]
    if not args.attention_output_gate:
        yield f"--attention-output-gate is not given; the attention of a {kind} has one; give it."
    if not args.apply_layernorm_1p:
        yield f"--apply-layernorm-1p is not given; the norms of a {kind} store the distance from one; give it."
    if args.allgather_cp:
        yield f"--allgather-cp is given; a {kind} has no sparse attention; drop it."
