"""Engine flags that SGLang would refuse, or ignore, only once a GPU is taken.  Pure: the flags in, messages out."""

from __future__ import annotations

import difflib
from argparse import Namespace
from collections.abc import Collection, Iterator
from typing import Any

from slime.backends.sglang_utils.server_args import present_name
from slime.backends.sglang_utils.sglang_config import SGLangConfig

NO_DRAFT_LAYERS = ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "llama", "glm4", "mistral", "minimax_m2")
"""Model types without a layer that drafts, as far as SGLang knows."""

HIDES_EXPERTS = ("minimax_m2",)
"""Model types whose layers do not tell SGLang's recorder of experts which layer they are (0.5.15.post1)."""


def engine_problems(args: Namespace) -> Iterator[str]:
    """One message for each rule that the engines' flags break; ``rollout_num_gpus_per_engine`` is sound."""
    yield from _parallel_sizes(args)
    yield from _memory(args)
    yield from _speculation(args)


def _parallel_sizes(args: Namespace) -> Iterator[str]:
    tp_size = args.rollout_num_gpus_per_engine // args.sglang_pp_size
    engine = f"--rollout-num-gpus-per-engine is {args.rollout_num_gpus_per_engine}"
    if args.sglang_pp_size > 1:
        engine += f" over --sglang-pp-size {args.sglang_pp_size}"
    for flag, size in (("--sglang-dp-size", args.sglang_dp_size), ("--sglang-ep-size", args.sglang_ep_size)):
        if size and tp_size % size:
            yield (
                f"{flag} is {size} and {engine}: the {tp_size} tensor-parallel ranks of an engine must divide into "
                f"{size} groups; use {_nearest_divisor(tp_size, size)}."
            )


def _nearest_divisor(number: int, wanted: int) -> int:
    return min((d for d in range(1, number + 1) if number % d == 0), key=lambda d: abs(d - wanted))


def _memory(args: Namespace) -> Iterator[str]:
    fraction = args.sglang_mem_fraction_static
    if fraction is not None and not 0 < fraction < 1:
        yield (
            f"--sglang-mem-fraction-static is {fraction}; it is the fraction of a GPU's memory for weights and cache, "
            "between 0 and 1, such as 0.7."
        )


def _speculation(args: Namespace) -> Iterator[str]:
    steps, tokens = args.sglang_speculative_num_steps, args.sglang_speculative_num_draft_tokens
    topk = args.sglang_speculative_eagle_topk
    if args.sglang_speculative_algorithm is None:
        for flag, value in (
            ("--sglang-speculative-num-steps", steps),
            ("--sglang-speculative-num-draft-tokens", tokens),
            ("--sglang-speculative-eagle-topk", topk),
        ):
            if value is not None:
                yield (
                    f"{flag} is {value}, which has no effect without --sglang-speculative-algorithm; say which "
                    "(EAGLE drafts with the model's own MTP layer), or drop the flag."
                )
    elif topk == 1 and steps and tokens and tokens > steps + 1:
        yield (
            f"--sglang-speculative-num-draft-tokens is {tokens} with --sglang-speculative-num-steps {steps} and "
            f"--sglang-speculative-eagle-topk 1: one chain of {steps} steps has {steps + 1} tokens at most."
        )


def draft_problems(args: Namespace, config: dict[str, Any]) -> Iterator[str]:
    """EAGLE drafts with the model's own layer, or with a model that is named.

    Args:
        args: the flags.
        config: the keys of config.json.
    """
    algorithm = args.sglang_speculative_algorithm
    if str(algorithm).upper() not in ("EAGLE", "NEXTN") or args.sglang_speculative_draft_model_path is not None:
        return
    own = any(config.get(key) for key in ("num_nextn_predict_layers", "mtp_num_hidden_layers"))
    if config.get("model_type") in NO_DRAFT_LAYERS and not own:
        yield (
            f"--sglang-speculative-algorithm {algorithm}: the checkpoint, a {config['model_type']}, has no MTP layer "
            "that could draft; name a draft model, --sglang-speculative-draft-model-path, or drop the flag."
        )


def quantized_problems(args: Namespace, config: dict[str, Any]) -> Iterator[str]:
    """Blocks of an FP8 checkpoint that the tensor-parallel ranks of an engine would cut through.

    Args:
        args: the flags.
        config: the keys of config.json.
    """
    block = (config.get("quantization_config") or {}).get("weight_block_size")
    if not block:
        return
    tp_size = args.rollout_num_gpus_per_engine // args.sglang_pp_size
    of_experts = (tp_size // (args.sglang_ep_size or 1), " or a larger --sglang-ep-size")
    matrices = {"moe_intermediate_size": of_experts}
    if config.get("first_k_dense_replace") or not config.get("moe_intermediate_size"):
        # Mixtral and what is named after it (MiniMax-M2) have only experts, and one size.
        has_only_experts = config.get("num_local_experts") and not config.get("moe_intermediate_size")
        of_mlp = (args.sglang_moe_dense_tp_size or tp_size, "")
        matrices = {"intermediate_size": of_experts if has_only_experts else of_mlp, **matrices}
    for key, (ranks, more) in matrices.items():
        size = config.get(key)
        if not size:
            continue
        if size % ranks or any(size // ranks % edge for edge in block):
            powers = [2**power for power in range(ranks.bit_length()) if 2**power < ranks]
            fitting = [n for n in powers if size % n == 0 and not any(size // n % edge for edge in block)]
            yield (
                f"--hf-checkpoint has FP8 blocks of {block[0]} x {block[1]} and {key} {size}, which {ranks} "
                f"tensor-parallel ranks of an engine would cut to {size / ranks:g}; SGLang serves whole blocks only. "
                f"Use engines of fewer GPUs (--rollout-num-gpus-per-engine {max(fitting, default=1)}){more}, or a "
                "bf16 checkpoint."
            )


def replay_problems(args: Namespace, config: dict[str, Any]) -> Iterator[str]:
    """Experts that the engine cannot give back.

    Args:
        args: the flags.
        config: the keys of config.json.
    """
    if vars(args).get("use_rollout_routing_replay") and config.get("model_type") in HIDES_EXPERTS:
        yield (
            f"--use-rollout-routing-replay: the installed SGLang does not say which experts a {config['model_type']} "
            "chose in which layer, and fails or answers those of the last; use --use-routing-replay, which records "
            "them in the trainer."
        )


def override_problems(path: str, config: SGLangConfig, known_fields: Collection[str]) -> Iterator[str]:
    """Overrides that are no field of ServerArgs, and look like one.

    What looks like none may belong to another version of SGLang; the engine drops it and says so.
    """
    for model in config.models:
        for group in model.server_groups:
            for name in (present_name(name, known_fields) for name in group.overrides):
                similar = difflib.get_close_matches(name, known_fields, n=1, cutoff=0.75)
                if name not in known_fields and similar:
                    yield (
                        f"--sglang-config {path}: the override {name} of the {group.worker_type} engines of "
                        f"{model.name} is no field of the installed SGLang's ServerArgs. Did you mean {similar[0]}?"
                    )
