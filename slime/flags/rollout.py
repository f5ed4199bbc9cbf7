"""Rollouts: sampling, over-sampling, partial and stale groups."""

from __future__ import annotations

import argparse
import importlib
import logging
from argparse import Namespace
from collections.abc import Iterator

from slime.flags.config import BackendFlags
from slime.flags.group import FlagGroup, flag_of
from slime.flags.kinds import (
    http_url,
    int_or_minus_one,
    non_negative_float,
    non_negative_int,
    positive_fraction,
    positive_int,
    positive_int_or_minus_one,
    seed,
    wait_s,
)
from slime.flags.words import NO_LENGTH

logger = logging.getLogger(__name__)

SFT_ROLLOUT = "slime.rollout.sft_rollout.generate_rollout"
DEFAULT_ROLLOUT = "slime.rollout.sglang_rollout.generate_rollout"
FULLY_ASYNC = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"
OWN_ROLLOUTS = (DEFAULT_ROLLOUT, FULLY_ASYNC)
"""Rollout functions that generate ``--n-samples-per-prompt`` responses and grade them with ``--rm-type``."""


def add_rollout_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the rollout group to ``parser``."""
    _add_sampling(parser)
    _add_collection(parser)
    _add_turns(parser)


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling", "Sampling parameters of rollouts.")
    group.add_argument(
        "--rollout-temperature",
        type=non_negative_float,
        default=1.0,
        help="Sampling temperature, above 0; the trainer divides its logits by it too.",
    )
    group.add_argument(
        "--rollout-top-p",
        type=positive_fraction,
        default=1.0,
        help="Top-p of sampling, in (0, 1]. Below 1, training replays the tokens that the engine kept.",
    )
    group.add_argument(
        "--rollout-top-k", type=positive_int_or_minus_one, default=-1, help="Top-k of sampling; -1: all tokens."
    )
    group.add_argument(
        "--rollout-max-context-len",
        type=positive_int,
        help="Maximum tokens of prompt and response together, for turns and custom functions. The built-in generate "
        "function limits only its prompts, by default to one token less.",
    )
    group.add_argument("--rollout-max-prompt-len", type=positive_int, help="Leave out prompts with more tokens.")
    group.add_argument("--rollout-max-response-len", type=positive_int, help="Maximum tokens of a response.")
    group.add_argument(
        "--rollout-skip-special-tokens", action="store_true", help="Remove special tokens from the text of responses."
    )
    group.add_argument("--rollout-stop", nargs="+", help="Strings that end a response.")
    group.add_argument(
        "--rollout-stop-token-ids", type=non_negative_int, nargs="+", help="Token ids that end a response."
    )
    group.add_argument(
        "--rollout-seed", type=seed, default=42, help="Seed of shuffling and of deterministic sampling."
    )


def _add_collection(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("rollout", "Size of a rollout, and handling of unfinished or stale groups.")
    group.add_argument("--rollout-batch-size", type=positive_int, help="Prompts in one rollout. Required.")
    group.add_argument(
        "--n-samples-per-prompt",
        type=positive_int,
        help="Responses per prompt. Default: 8 where the estimator only compares them with each other, else 1.",
    )
    group.add_argument(
        "--over-sampling-batch-size",
        type=positive_int,
        help="Prompts to submit at a time; at least --rollout-batch-size, which is the default.",
    )
    group.add_argument(
        "--partial-rollout",
        action="store_true",
        help="Keep responses that are aborted because a rollout is full, and continue them in the next rollout.",
    )
    group.add_argument(
        "--mask-offpolicy-in-partial-rollout",
        action="store_true",
        help="Exclude tokens of an earlier policy from the loss, in groups that a later rollout continues.",
    )
    group.add_argument(
        "--max-staleness",
        type=non_negative_int,
        help="Maximum number of weight versions between the oldest token of a sample and its training. Default: no "
        "limit. train_async.py needs 1 or more.",
    )
    group.add_argument(
        "--stale-group-policy",
        choices=["regenerate", "mask"],
        default="regenerate",
        help="Handling of a group beyond --max-staleness: generate it again, or keep it with stale samples masked.",
    )
    group.add_argument(
        "--rollout-data-transport",
        choices=["object-store", "nixl"],
        default="object-store",
        help="Transport of rollout data to the trainer: Ray's object store, or NIXL, from memory to memory.",
    )
    group.add_argument(
        "--rollout-external-engine-addrs",
        nargs="+",
        metavar="HOST:PORT",
        help="Addresses of engines that run outside of the job; slime then starts none.",
    )
    group.add_argument(
        "--unsafe-local-sandbox",
        action="store_true",
        help="Do not isolate local sandboxes: programs that the model wrote may do whatever the rollout process may. "
        "Needed if user namespaces are not available.",
    )
    group.add_argument(
        "--use-distributed-post", action="store_true", help="Send HTTP requests from several Ray actors."
    )
    group.add_argument("--rollout-buffer-url", type=http_url, help="Address of a stand-alone rollout buffer service.")
    group.add_argument(
        "--fetch-trajectory-retry-times",
        type=int_or_minus_one,
        default=-1,
        help="Retries of requests to the rollout buffer service; -1: no limit.",
    )
    group.add_argument("--rollout-task-type", default="math", help="Task name to send to the rollout buffer service.")
    group.add_argument(
        "--num-rollout", type=non_negative_int, help="Rollouts in the whole run; takes precedence over --num-epoch."
    )
    group.add_argument("--num-epoch", type=positive_int, help="Passes over the prompts, instead of --num-rollout.")
    group.add_argument(
        "--start-rollout-id",
        type=non_negative_int,
        help="First rollout of this run. Default: the one after the loaded checkpoint's.",
    )


def _add_turns(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("turns", "Conversations of the policy with tools and environments.")
    parser.set_defaults(tool_readers={})  # prefix of a tool source that is not a function -> import path of its reader
    group.add_argument(
        "--rollout-max-turns", type=positive_int, default=16, help="Turns of the policy before a sample is truncated."
    )
    group.add_argument(
        "--turn-timeout-s", type=wait_s, default=60.0, help="Seconds a tool, or a step of the environment, may take."
    )


def derive_lengths(args: Namespace) -> None:
    """Limit prompts such that a limited context has room for at least one response token."""
    if args.rollout_max_context_len is not None:
        if args.rollout_max_prompt_len is None:
            args.rollout_max_prompt_len = args.rollout_max_context_len - 1
        if args.eval_max_context_len is None:
            args.eval_max_context_len = args.rollout_max_context_len


def check_rollouts(args: Namespace) -> Iterator[str]:
    """Yield one message per length, package or sampling flag that is missing or invalid."""
    if args.num_rollout is None and args.num_epoch is None:
        yield NO_LENGTH
    if args.num_rollout is None and args.num_epoch is not None and not args.rollout_global_dataset:
        yield (
            "--num-epoch counts passes over the data set, but --disable-rollout-global-dataset leaves none; "
            "give --num-rollout."
        )
    if None not in (args.start_rollout_id, args.num_rollout) and 0 < args.num_rollout <= args.start_rollout_id:
        yield (
            f"--start-rollout-id {args.start_rollout_id} with --num-rollout {args.num_rollout} leaves nothing to do: "
            "rollouts are counted from 0, and --num-rollout counts them all; raise it."
        )

    if args.rollout_data_transport == "nixl":
        try:
            importlib.import_module("nixl")
        except ImportError as error:
            yield (
                f"--rollout-data-transport nixl needs the package nixl, and here {error}. Install it on every node "
                "(pip install nixl), or leave the flag out: Ray's object store serves everywhere."
            )
    if args.rollout_temperature <= 0:
        yield (
            f"--rollout-temperature is {args.rollout_temperature}; it must be above 0, because the trainer divides "
            "its logits by it. For greedy evals use --eval-temperature 0."
        )
    context, prompt = args.rollout_max_context_len, args.rollout_max_prompt_len
    if context is not None and prompt > context - 1:
        yield (
            f"--rollout-max-prompt-len {prompt} leaves no room for a response in --rollout-max-context-len {context}; "
            f"it must be at most {context - 1}."
        )
    served = BackendFlags.of(args).sglang_context_length
    for name in ("rollout_max_response_len", "eval_max_response_len"):
        if served is not None and (length := getattr(args, name)) is not None and length >= served:
            yield (
                f"{flag_of(name)} {length} leaves no room for a prompt in --sglang-context-length {served}; it must "
                f"be at most {served - 1}, less the longest prompt."
            )


def check_rollout_functions(args: Namespace) -> Iterator[str]:
    """Yield one message per rollout function that conflicts with other flags."""
    evaluation = args.eval_function_path if args.eval_datasets and not args.debug_train_only else None
    if evaluation == FULLY_ASYNC:
        yield (
            f"--eval-function-path is {FULLY_ASYNC}, which cannot evaluate; give --eval-function-path "
            f"{DEFAULT_ROLLOUT}."
        )
    if evaluation == DEFAULT_ROLLOUT and args.group_rm:
        yield (
            "--group-rm grades the answers to a prompt together, an evaluation each by itself: drop --eval-config, "
            "--eval-prompt-data and --eval-interval, or give a function of your own as --eval-function-path."
        )
    if args.rollout_function_path == FULLY_ASYNC and args.offload_rollout:
        yield (
            f"--rollout-function-path {FULLY_ASYNC} keeps requests in flight while the trainer works, so the engines "
            "cannot be offloaded: drop --colocate and --offload-rollout, and use train_async.py."
        )
    forge = "slime.rollout.forge_load.generate_rollout"
    if (args.load_forge_rollout_data is not None) != (forge in (args.rollout_function_path, args.eval_function_path)):
        yield (
            f"--load-forge-rollout-data is {args.load_forge_rollout_data} and --rollout-function-path is "
            f"{args.rollout_function_path}; a replay beside engines takes both the file and --rollout-function-path "
            f"{forge}."
        )
    if args.rollout_function_path == SFT_ROLLOUT and args.n_samples_per_prompt != 1:
        yield (
            f"--n-samples-per-prompt is {args.n_samples_per_prompt}; sft_rollout needs 1: a row of the data has one "
            "response."
        )
    gives_advantages = ("custom_advantage_function_path", "custom_reward_post_process_path", "use_opd")
    is_learning = args.custom_convert_samples_to_train_data_path or any(
        vars(args).get(one) for one in gives_advantages
    )
    if args.rollout_function_path == SFT_ROLLOUT and args.loss_type == "policy_loss" and not is_learning:
        yield (
            "--loss-type is policy_loss, whose advantages are all 0 for the answers of sft_rollout, which have no "
            "reward; give --loss-type sft_loss."
        )


def advise_rollouts(args: Namespace) -> None:
    """Log rollout settings without effect."""
    if args.num_rollout is not None and args.num_epoch is not None:
        logger.warning("--num-rollout %d takes precedence over --num-epoch %d.", args.num_rollout, args.num_epoch)
    if args.rollout_function_path == FULLY_ASYNC and args.over_sampling_batch_size > args.rollout_batch_size:
        logger.warning(
            "--over-sampling-batch-size %d has no effect with --rollout-function-path %s, which fills the engines.",
            args.over_sampling_batch_size,
            FULLY_ASYNC,
        )


GROUP = FlagGroup(
    add_rollout_arguments,
    derive=(derive_lengths,),
    check=(check_rollouts, check_rollout_functions),
    advise=(advise_rollouts,),
    needs=(
        ("mask_offpolicy_in_partial_rollout", "partial_rollout", "it masks what partial rollouts carry over"),
        ("stale_group_policy=mask", "max_staleness", "that says what is stale"),
    ),
)
