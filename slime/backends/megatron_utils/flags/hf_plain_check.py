"""Flags of plain attention and of a softmax router against the HF config.

What differs here would not fail: positions that are stretched otherwise, or experts weighed otherwise, give log-probs
that are merely wrong.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from slime.backends.megatron_utils.flags.latent_arguments import hf_rope_settings

_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""What megatron-core's --use-rope-scaling has built in."""


def attention_mismatches(args: Namespace, config: dict[str, Any]) -> Iterator[str]:
    """One line for each flag of attention that differs; nothing for latent attention, which has checks of its own."""
    if args.multi_latent_attention or config.get("kv_lora_rank") is not None:
        return
    yield from _rotary_mismatches(args, config)
    for key, flag, given in (
        ("attention_bias", "--add-qkv-bias", args.add_qkv_bias),
        ("use_qk_norm", "--qk-layernorm", args.qk_layernorm),
    ):
        if config.get(key) is not None and bool(config[key]) != given:
            yield f"{flag} is {'given' if given else 'not given'}; {key} is {config[key]}"


def _rotary_mismatches(args: Namespace, config: dict[str, Any]) -> Iterator[str]:
    settings = hf_rope_settings(config)
    partial = settings["partial_rotary_factor"]
    if partial is not None and partial != args.rotary_percent:
        yield f"--rotary-percent is {args.rotary_percent}; partial_rotary_factor is {partial}"
    kind = settings["rope_type"]
    if kind == "default":
        if args.use_rope_scaling:
            yield "--use-rope-scaling is given; rope_type is default"
    elif kind == "llama3":
        if not args.use_rope_scaling:
            yield "--use-rope-scaling is not given; rope_type is llama3"
        elif settings.get("factor") != args.rope_scaling_factor:
            yield f"--rope-scaling-factor is {args.rope_scaling_factor}; factor of llama3 is {settings.get('factor')}"
        for name, built_in in _LLAMA3.items():
            if settings.get(name) != built_in:
                yield f"--use-rope-scaling has {name} {built_in} built in; the config says {settings.get(name)}"
    else:
        yield f"--use-rope-scaling knows positions of type llama3 only; rope_type is {kind}"


def softmax_router_mismatches(args: Namespace, config: dict[str, Any]) -> Iterator[str]:
    """One line for each flag of Qwen's experts that differs."""
    if not args.num_experts or config.get("num_experts") is None:
        return
    for key, flag, given in (
        ("num_experts", "--num-experts", args.num_experts),
        ("num_experts_per_tok", "--moe-router-topk", args.moe_router_topk),
    ):
        if config.get(key) not in (None, given):
            yield f"{flag} is {given}; {key} is {config[key]}"
    is_normalised = config.get("norm_topk_prob")
    if is_normalised is None or args.moe_router_score_function != "softmax" or args.moe_router_topk == 1:
        return
    if is_normalised == args.moe_router_pre_softmax:
        state = "given" if args.moe_router_pre_softmax else "not given"
        yield (
            f"--moe-router-pre-softmax is {state}; norm_topk_prob is {is_normalised} (without the flag, the weights "
            "of the chosen experts add up to 1)"
        )
