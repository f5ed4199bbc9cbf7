"""Flags of multi-latent attention and of the router that goes with it, against the HF config."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from slime.backends.megatron_utils.flags.config_flags import flag_of
from slime.backends.megatron_utils.flags.rotary_arguments import hf_rope_settings, hf_yarn_settings, yarn_mismatches
from slime.backends.megatron_utils.models.family import differs

_SIZES = {
    # key of config.json -> attribute of args
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_head_dim",
    "qk_rope_head_dim": "qk_pos_emb_head_dim",
    "v_head_dim": "v_head_dim",
}
_ROUTER_SIZES = {
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "moe_router_topk",
    "routed_scaling_factor": "moe_router_topk_scaling_factor",
}


def latent_mismatches(args: Namespace, config: dict[str, Any]) -> Iterator[str]:
    """Yield one line for each flag of latent attention that differs from the HF config."""
    has_latents = config.get("kv_lora_rank") is not None
    if has_latents and not args.multi_latent_attention:
        yield f"--multi-latent-attention is not given; kv_lora_rank is {config['kv_lora_rank']}"
    if not (has_latents and args.multi_latent_attention):
        return
    for key, attribute in _SIZES.items():
        yield from _difference(key, config.get(key), attribute, vars(args)[attribute])
    if "q_lora_rank" in config and config["q_lora_rank"] != args.q_lora_rank:
        yield f"--q-lora-rank is {args.q_lora_rank}; q_lora_rank is {config['q_lora_rank']}"
    if not args.qk_layernorm:
        yield "--qk-layernorm is not given; the latents of this model are normed"
    if config.get("rope_interleave") is False:
        yield "--multi-latent-attention turns interleaved pairs of dimensions; rope_interleave is False"
    if config.get("attention_bias"):
        yield "--multi-latent-attention has no biases; attention_bias is True"
    partial = hf_rope_settings(config)["partial_rotary_factor"]
    if partial is not None and differs(partial, 1.0):
        yield f"--qk-pos-emb-head-dim dimensions turn; partial_rotary_factor is {partial}"
    yarn = hf_yarn_settings(config)
    if differs(yarn["rotary_scaling_factor"], 1.0) and args.rope_type != "yarn":
        yield f"--rope-type is {args.rope_type}; rope_type is yarn"
    yield from yarn_mismatches(args, yarn)


def sigmoid_router_mismatches(args: Namespace, config: dict[str, Any]) -> Iterator[str]:
    """Yield one line for each flag of DeepSeek's router (sigmoid scores, a bias, groups) that differs."""
    if not args.num_experts or config.get("n_routed_experts") is None:
        return
    for key, attribute in _ROUTER_SIZES.items():
        default = 1.0 if attribute == "moe_router_topk_scaling_factor" else None
        yield from _difference(key, config.get(key), attribute, vars(args)[attribute] or default)
    if config.get("scoring_func") not in (None, args.moe_router_score_function):
        function = config["scoring_func"]
        yield f"--moe-router-score-function is {args.moe_router_score_function}; scoring_func is {function}"
    if args.moe_router_score_function != "sigmoid":
        return
    topk = args.moe_router_topk
    if config.get("norm_topk_prob") is False and topk > 1:
        yield "--moe-router-score-function sigmoid normalises the chosen experts' scores; norm_topk_prob is False"
    if config.get("norm_topk_prob") is True and topk == 1:
        yield "--moe-router-topk is 1, whose score megatron-core does not normalise; norm_topk_prob is True"
    shared = (config.get("n_shared_experts") or 0) * (config.get("moe_intermediate_size") or 0)
    yield from _difference(
        "n_shared_experts * moe_intermediate_size",
        shared,
        "moe_shared_expert_intermediate_size",
        args.moe_shared_expert_intermediate_size or 0,
    )
    yield from _group_mismatches(args, config)
    yield from _dense_layer_mismatches(args, config)


def _group_mismatches(args: Namespace, config: dict[str, Any]) -> Iterator[str]:
    """Yield one line for each flag of groups of experts that differs."""
    groups, chosen = config.get("n_group") or 1, config.get("topk_group") or 1
    yield from _difference("n_group", groups, "moe_router_num_groups", args.moe_router_num_groups or 1)
    yield from _difference("topk_group", chosen, "moe_router_group_topk", args.moe_router_group_topk or 1)
    if groups > chosen and args.moe_router_topk // chosen != 2:
        yield (
            f"--moe-router-topk is {args.moe_router_topk}; megatron-core ranks a group of experts by its best "
            f"{args.moe_router_topk} // {chosen} (topk_group), the model by its best two"
        )


def _dense_layer_mismatches(args: Namespace, config: dict[str, Any]) -> Iterator[str]:
    """Yield one line when other layers have experts."""
    num_dense, kinds = config.get("first_k_dense_replace"), config.get("mlp_layer_types")
    if kinds is not None:
        expected = [int(kind != "dense") for kind in kinds]
    elif num_dense is not None and config.get("moe_layer_freq", 1) == 1:
        expected = [int(index >= num_dense) for index in range(args.num_layers)]
    else:
        return
    frequency = args.moe_layer_freq
    actual = [int(i % frequency == 0) for i in range(args.num_layers)] if isinstance(frequency, int) else frequency
    if list(actual) != expected:
        dense = [index for index, has_experts in enumerate(expected) if not has_experts]
        yield f"--moe-layer-freq is {frequency}; the dense layers of the model are {dense}"


def _difference(key: str, expected: Any, attribute: str, actual: Any) -> Iterator[str]:
    if expected is not None and actual is not None and differs(expected, actual):
        yield f"{flag_of(attribute)} is {actual}; {key} is {expected}"
