"""Checks that join several groups of flags: what a run would learn, what would waste the GPUs it takes, and engines
that do not go with the model family, of which their own package knows nothing.
"""

from __future__ import annotations

import difflib
import logging
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import torch

from slime.algorithms.advantages import GroupConfig, get_estimator
from slime.backends.megatron_utils.models import family_of
from slime.backends.megatron_utils.models.flag_rules import hf_rope_settings
from slime.backends.sglang_utils.arguments import read_config
from slime.flags.algorithm import advise_algorithm
from slime.flags.config import backend_flags
from slime.flags.reward import BOXED_PREFIX, INSTALL_MATH_VERIFY, RM_TYPES, is_math_verify_installed
from slime.flags.rollout import OWN_ROLLOUTS, SFT_ROLLOUT
from slime.utils.errors import ConfigError
from slime.utils.files import language_config

logger = logging.getLogger(__name__)

DICT_REWARDS = ("dapo",)
"""Built-in graders whose reward is a dict, so that a key must say which entry is trained on."""
NUMBER_REWARDS = tuple(name for name in RM_TYPES if name not in (*DICT_REWARDS, "remote_rm"))
"""Those whose reward is a number."""


def check_rewards(args: Namespace) -> Iterator[str]:
    """Yield one message for each grader that does not exist or does not fit the other flags."""
    if args.rm_type is not None:
        yield from _grader(args.rm_type, "--rm-type")
    for dataset in args.eval_datasets:
        if dataset.rm_type is not None:
            yield from _grader(dataset.rm_type, f"rm_type of eval data set {dataset.name}:")
    if args.rm_type is None or args.custom_rm_path is not None:
        return
    name = args.rm_type.removeprefix(BOXED_PREFIX)
    if name in DICT_REWARDS and args.reward_key is None:
        yield f"--rm-type {args.rm_type} gives a dict; say which entry is the reward: --reward-key score."
    if name in NUMBER_REWARDS and args.reward_key is not None and args.custom_generate_function_path is None:
        yield (
            f"--reward-key {args.reward_key} chooses an entry of a dict, but --rm-type {args.rm_type} gives a number. "
            "Drop --reward-key, or use a grader that gives a dict (dapo, remote_rm, --custom-rm-path)."
        )


def _grader(rm_type: str, where: str) -> Iterator[str]:
    name = rm_type.removeprefix(BOXED_PREFIX)
    if name not in RM_TYPES:
        similar = difflib.get_close_matches(name, RM_TYPES, n=1)
        hint = f"Did you mean {similar[0]}? " if similar else ""
        yield (
            f"{where} {rm_type} is no grader. {hint}There are {', '.join(RM_TYPES)}, each also with the prefix "
            f"{BOXED_PREFIX}; your own goes into --custom-rm-path."
        )
    if name == "math_verify" and not is_math_verify_installed():
        yield f"{where} {rm_type}: {INSTALL_MATH_VERIFY}"


def check_rollout_functions(args: Namespace) -> Iterator[str]:
    """Yield one message for each rollout function that cannot work with the other flags."""
    path = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"
    if args.eval_function_path == path and args.eval_datasets and not args.debug_train_only:
        yield (
            f"--eval-function-path is {path}, which cannot evaluate; give --eval-function-path "
            "slime.rollout.sglang_rollout.generate_rollout."
        )
    if args.rollout_function_path == path and args.offload_rollout:
        yield (
            f"--rollout-function-path {path} keeps requests in flight while the trainer works, so the engines "
            "cannot be offloaded: drop --colocate and --offload-rollout, and use train_async.py."
        )
    forge = "slime.rollout.forge_load.generate_rollout"
    if (args.load_forge_rollout_data is not None) != (forge in (args.rollout_function_path, args.eval_function_path)):
        yield (
            f"--load-forge-rollout-data is {args.load_forge_rollout_data} and --rollout-function-path is "
            f"{args.rollout_function_path}; a replay beside engines takes both the file and --rollout-function-path "
            f"{forge}."
        )
    if args.stale_group_policy != "regenerate" and args.max_staleness is None:
        yield f"--stale-group-policy {args.stale_group_policy} needs --max-staleness, which says what is stale."


def check_run(args: Namespace) -> Iterator[str]:
    """Yield one message for each thing that makes the run pointless, or that would stop it later."""
    yield from _supervised(args)
    yield from _signal(args)
    yield from _context(args)
    yield from _shared_engines(args)
    if None not in (args.start_rollout_id, args.num_rollout) and 0 < args.num_rollout <= args.start_rollout_id:
        yield (
            f"--start-rollout-id {args.start_rollout_id} with --num-rollout {args.num_rollout} leaves nothing to do: "
            "rollouts are counted from 0, and --num-rollout counts them all; raise it."
        )


def check_async_arguments(args: Namespace) -> None:
    """Refuse what only ``train_async.py``, which generates while it trains, cannot do.

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
            "train_async.py generates while it trains, so the engines cannot be offloaded: drop "
            "--offload-rollout (and --offload, which stands for it), or use train.py."
        )


def check_in_step_arguments(args: Namespace) -> None:
    """Refuse what ``train.py``, whose rollouts are drawn by the weights that train on them, cannot do.

    Raises:
        ConfigError: names the flag.
    """
    if args.eval_in_background:
        raise ConfigError(
            "--eval-in-background evaluates while the trainer goes on, and train.py takes one step after the other; "
            "drop the flag, or use train_async.py."
        )
    if args.keep_old_actor:
        raise ConfigError(
            "--keep-old-actor keeps the weights that generated a rollout while the trainer continues "
            "(train_async.py); with "
            "train.py those are the actor's own; drop the flag, or use train_async.py."
        )


def _signal(args: Namespace) -> Iterator[str]:
    """Refuse groups of one: measured against itself, a sample teaches nothing."""
    is_training = not (args.debug_rollout_only or args.debug_train_only or args.num_rollout == 0)
    if not is_training or args.n_samples_per_prompt > 1 or args.loss_type != "policy_loss":
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
    """Refuse answers that leave no room for a prompt in the engines' context."""
    context = backend_flags(args).sglang_context_length
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
    """Refuse a colocated engine that lies partly on the trainer's GPUs and partly beside them."""
    if not args.colocate or args.rollout_external or not args.rollout_num_gpus:
        return
    trainer, engine = args.actor_num_nodes * args.actor_num_gpus_per_node, args.rollout_num_gpus_per_engine
    is_cut = args.rollout_num_gpus > trainer and trainer % engine
    if is_cut and backend_flags(args).sglang_config is None:
        yield (
            f"--rollout-num-gpus-per-engine {engine} with --colocate: engines take {engine} GPUs each from the first "
            f"on, and the trainer's {trainer} GPUs end in the middle of one. With --rollout-num-gpus "
            f"{args.rollout_num_gpus}, which goes beyond them, {engine} must divide {trainer}."
        )


def advise(args: Namespace) -> None:
    """Log what works, but may not be what was meant."""
    if args.num_rollout is not None and args.num_epoch is not None:
        logger.warning("--num-rollout %d takes precedence over --num-epoch %d.", args.num_rollout, args.num_epoch)
    if args.save is not None and args.save_interval is None and not args.debug_rollout_only:
        logger.warning("--save is given without --save-interval: no checkpoint will be written.")
    if args.max_tokens_per_gpu is not None and not args.use_dynamic_batch_size:
        logger.warning("--max-tokens-per-gpu has no effect without --use-dynamic-batch-size.")
    advise_algorithm(args)
    _advise_lengths(args)
    _advise_idle_gpus(args)
    _advise_incomplete_steps(args)


def _advise_lengths(args: Namespace) -> None:
    parts = backend_flags(args).context_parallel_size
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


def _advise_idle_gpus(args: Namespace) -> None:
    trainer = args.actor_num_nodes * args.actor_num_gpus_per_node
    if args.colocate and (args.rollout_num_gpus or 0) > trainer:
        logger.warning(
            "--rollout-num-gpus %d is more than the trainer's %d, which --colocate shares: the other %d have engines "
            "only, and stay idle while the trainer works. Drop --rollout-num-gpus if that is not meant.",
            args.rollout_num_gpus,
            trainer,
            args.rollout_num_gpus - trainer,
        )


def _advise_incomplete_steps(args: Namespace) -> None:
    if not args.global_batch_size or args.debug_rollout_only:
        return
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


def check_engines_of_family(args: Namespace) -> None:
    """Refuse engine flags that do not go with the family of ``--hf-checkpoint``.

    Raises:
        ConfigError: with every flag that does not.
    """
    if args.rollout_external:
        return
    config = read_config(args.hf_checkpoint)
    problems = [*draft_problems(args, config), *replay_problems(args, config), *yarn_problems(args, config)]
    if problems:
        raise ConfigError("\n".join(problems))


def draft_problems(args: Namespace, config: dict[str, Any]) -> Iterator[str]:
    """Yield a message for EAGLE without a layer that drafts or a model that is named."""
    algorithm = args.sglang_speculative_algorithm
    if str(algorithm).upper() not in ("EAGLE", "NEXTN") or args.sglang_speculative_draft_model_path is not None:
        return
    own = any(config.get(key) for key in ("num_nextn_predict_layers", "mtp_num_hidden_layers"))
    family = family_of(config)
    if family is not None and not (family.weight_map.mtp or own):
        yield (
            f"--sglang-speculative-algorithm {algorithm}: the checkpoint, a {config['model_type']}, has no MTP layer "
            "that could draft; name a draft model, --sglang-speculative-draft-model-path, or drop the flag."
        )


def yarn_problems(args: Namespace, config: dict[str, Any]) -> Iterator[str]:
    """Yield a message for engines that serve positions beyond those for which YaRN stretches the rotary angles.

    SGLang's table of angles ends there; it extends the table up to the context length with angles that are not
    stretched, and the engine then computes another function than the trainer.
    """
    text = language_config(config)
    rope = hf_rope_settings(text)
    original, factor = rope["original_max_position_embeddings"], rope.get("factor")
    if rope["rope_type"] not in ("yarn", "deepseek_yarn") or not original or not factor:
        return
    reach, given = int(original * factor), args.sglang_context_length
    served = given or text.get("max_position_embeddings") or 0
    if served > reach:
        what = "--sglang-context-length" if given else "max_position_embeddings of config.json"
        yield (
            f"{what} is {served}, and YaRN of config.json stretches {reach} positions (factor {factor:g} of "
            f"original_max_position_embeddings {original}); SGLang serves those behind with other angles than the "
            f"trainer. Give --sglang-context-length {reach}, or correct rope_scaling in config.json."
        )


def replay_problems(args: Namespace, config: dict[str, Any]) -> Iterator[str]:
    """Yield a message for experts that the engine cannot give back."""
    family = family_of(config)
    if args.use_rollout_routing_replay and family is not None and family.engine_hides_experts:
        yield (
            f"--use-rollout-routing-replay: the installed SGLang does not say which experts a {config['model_type']} "
            "chose in which layer, and fails or answers those of the last; use --use-routing-replay, which records "
            "them in the trainer."
        )
