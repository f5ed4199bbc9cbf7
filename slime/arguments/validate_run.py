"""Checks of what a run would learn and of the room that its answers have: what would waste the GPUs it takes."""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Iterator

import torch

from slime.algorithms.advantages import GroupConfig, get_estimator
from slime.utils.errors import ConfigError

logger = logging.getLogger(__name__)

OWN_ROLLOUTS = (
    "slime.rollout.sglang_rollout.generate_rollout",
    "slime.rollout.fully_async_rollout.generate_rollout_fully_async",
    "slime.rollout.sglang_streaming_rollout.generate_rollout",
)
"""Rollout functions that take ``--n-samples-per-prompt`` answers and grade them with ``--rm-type``."""
SFT_ROLLOUT = "slime.rollout.sft_rollout.generate_rollout"


def check_run(args: Namespace) -> Iterator[str]:
    """One message for each thing that makes the run pointless, or that it would stumble over later."""
    yield from _signal(args)
    yield from _supervised(args)
    yield from _context(args)
    yield from _shared_engines(args)
    if None not in (args.start_rollout_id, args.num_rollout) and 0 < args.num_rollout <= args.start_rollout_id:
        yield (
            f"--start-rollout-id {args.start_rollout_id} with --num-rollout {args.num_rollout} leaves nothing to do: "
            "rollouts are counted from 0, and --num-rollout counts them all; raise it."
        )


def check_async_arguments(args: Namespace) -> None:
    """What only ``train_async.py``, which generates while it trains, cannot do.

    Raises:
        ConfigError: names the flags.
    """
    if args.colocate:
        raise ConfigError(
            "train_async.py generates and trains at the same time, so --colocate cannot work here: give the engines "
            "GPUs of their own with --rollout-num-gpus, or use train.py."
        )
    if args.offload_rollout:
        raise ConfigError(
            "train_async.py generates while it trains, so the engines cannot give their memory away: drop "
            "--offload-rollout (and --offload, which stands for it), or use train.py."
        )


def _signal(args: Namespace) -> Iterator[str]:
    """A group of one, measured against itself, teaches nothing."""
    if args.debug_rollout_only or args.n_samples_per_prompt > 1 or args.loss_type != "policy_loss":
        return
    plug_ins = (
        "custom_generate_function_path",
        "custom_reward_post_process_path",
        "custom_advantage_function_path",
        "custom_convert_samples_to_train_data_path",
    )
    others = args.use_opd or args.kl_coef or args.kl_loss_coef or args.entropy_coef or args.enable_mtp_training
    is_ours = args.rollout_function_path in OWN_ROLLOUTS and not any(getattr(args, name) for name in plug_ins)
    if others or not is_ours or not (args.compute_advantages_and_returns and args.rewards_normalization):
        return
    baseline = get_estimator(args.advantage_estimator).group_baseline
    if baseline is None:
        return
    reward = torch.ones(1, dtype=torch.float64)
    if torch.equal(baseline(reward, GroupConfig(divide_by_std=False)).baseline_G, reward):
        yield (
            f"--n-samples-per-prompt {args.n_samples_per_prompt} with --advantage-estimator "
            f"{args.advantage_estimator}: an answer is compared with the others to its prompt, and there are none, so "
            "that every advantage is 0 and nothing is learnt. Use 2 or more, or --disable-rewards-normalization."
        )


def _supervised(args: Namespace) -> Iterator[str]:
    if args.rollout_function_path == SFT_ROLLOUT and args.n_samples_per_prompt != 1:
        yield (
            f"--n-samples-per-prompt is {args.n_samples_per_prompt}; sft_rollout needs 1: a row of the data has one "
            "response."
        )


def _context(args: Namespace) -> Iterator[str]:
    """SGLang refuses a request whose prompt and longest answer do not fit its context together."""
    context = getattr(args, "sglang_context_length", None)
    if context is None:
        return
    lengths = {"--rollout-max-response-len": args.rollout_max_response_len}
    if args.eval_datasets or args.eval_max_response_len:
        lengths["--eval-max-response-len"] = args.eval_max_response_len
    for flag, length in lengths.items():
        if length is not None and length >= context:
            yield (
                f"{flag} {length} leaves no room for a prompt in --sglang-context-length {context}; it must be "
                f"at most {context - 1}, less the longest prompt."
            )


def _shared_engines(args: Namespace) -> Iterator[str]:
    """A colocated engine lies on the trainer's GPUs or beside them, not on both."""
    if not args.colocate or args.rollout_external or not args.rollout_num_gpus:
        return
    trainer, engine = args.actor_num_nodes * args.actor_num_gpus_per_node, args.rollout_num_gpus_per_engine
    is_cut = args.rollout_num_gpus > trainer and trainer % engine
    if is_cut and getattr(args, "sglang_config", None) is None:
        yield (
            f"--rollout-num-gpus-per-engine {engine} with --colocate: engines take {engine} GPUs each from the first "
            f"on, and the trainer's {trainer} GPUs end in the middle of one. With --rollout-num-gpus "
            f"{args.rollout_num_gpus}, which goes beyond them, {engine} must divide {trainer}."
        )


def advise(args: Namespace) -> None:
    """Log what works, but may not be what was meant."""
    _advise_lengths(args)
    trainer = args.actor_num_nodes * args.actor_num_gpus_per_node
    if args.colocate and (args.rollout_num_gpus or 0) > trainer:
        logger.warning(
            "--rollout-num-gpus %d is more than the trainer's %d, which --colocate shares: the other %d have engines "
            "only, and stay idle while the trainer works. Drop --rollout-num-gpus if that is not meant.",
            args.rollout_num_gpus,
            trainer,
            args.rollout_num_gpus - trainer,
        )
    if args.global_batch_size and not args.debug_rollout_only:
        samples = args.rollout_batch_size * args.n_samples_per_prompt
        if rest := samples % args.global_batch_size:
            logger.warning(
                "--global-batch-size %d does not divide the %d samples of a rollout (--rollout-batch-size %d x "
                "--n-samples-per-prompt %d): %d samples of each rollout do not fill a step and are not trained on.",
                args.global_batch_size,
                samples,
                args.rollout_batch_size,
                args.n_samples_per_prompt,
                rest,
            )


def _advise_lengths(args: Namespace) -> None:
    parts = getattr(args, "context_parallel_size", 1)
    if not args.use_dynamic_batch_size or args.debug_rollout_only or args.rollout_max_response_len is None:
        return
    if args.rollout_max_response_len > args.max_tokens_per_gpu * parts:
        logger.warning(
            "--rollout-max-response-len %d is more than the %d tokens of a micro-batch (--max-tokens-per-gpu %d x "
            "--context-parallel-size %d): a longer sample makes a micro-batch of its own, and takes the memory of it.",
            args.rollout_max_response_len,
            args.max_tokens_per_gpu * parts,
            args.max_tokens_per_gpu,
            parts,
        )
