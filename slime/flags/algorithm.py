"""Algorithm: the policy gradient, its advantages, clipping, KL and off-policy corrections."""

from __future__ import annotations

import argparse
import logging
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from slime.algorithms.advantages import ESTIMATORS, GroupConfig, get_estimator
from slime.algorithms.kl import KL_KINDS
from slime.algorithms.policy_losses import CISPO
from slime.algorithms.registry import Registry
from slime.flags.group import FlagGroup, flag_of
from slime.flags.kinds import RegistryChoices, fraction, non_negative_float, non_negative_int, positive_int
from slime.flags.rollout import OWN_ROLLOUTS

logger = logging.getLogger(__name__)

GROUP_SIZE = 8
"""Responses per prompt where they are compared with each other, and no flag says how many."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossType:
    """Properties of a loss; the functions of the same names are in ``slime.backends.megatron_utils.loss``."""

    summary: str
    needs_advantages: bool = False
    """It needs ``compute_advantages_and_returns``."""
    of_critic: bool = False
    """It is chosen by the role, not by ``--loss-type``."""


LOSS_TYPES: Registry[LossType] = Registry(
    "--loss-type",
    {
        "policy_loss": LossType(summary="the surrogate of the advantage estimator", needs_advantages=True),
        "value_loss": LossType(summary="the critic's regression", needs_advantages=True, of_critic=True),
        "sft_loss": LossType(summary="negative log-likelihood of the response"),
        "custom_loss": LossType(summary="--custom-loss-function-path"),
    },
)

ACTOR_LOSS_TYPES = tuple(name for name, loss in LOSS_TYPES.items() if not loss.of_critic)
"""The values of ``--loss-type``."""


def add_algorithm_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the loss, advantage, KL and off-policy groups to ``parser``."""
    _add_loss(parser)
    _add_advantages(parser)
    _add_kl(parser)
    _add_off_policy(parser)
    parser.set_defaults(  # for extensions
        frozen_policies=(),  # FrozenPolicy objects, in addition to the actor and its reference
        advantage_terms=(),  # in words: terms added to the advantages, which make them read the old log-probs
        named_columns={},  # column of the train data -> arguments of slime.train_data.convert.named_entry
    )


def _add_loss(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("loss", "The loss that an optimizer step minimizes.")
    group.add_argument("--loss-type", choices=ACTOR_LOSS_TYPES, default="policy_loss", help="The loss to train with.")
    group.add_argument(
        "--eps-clip",
        type=non_negative_float,
        default=0.2,
        help="PPO clips importance ratios below 1 minus this value.",
    )
    group.add_argument(
        "--eps-clip-high",
        type=non_negative_float,
        help="PPO clips importance ratios above 1 plus this value. Default: --eps-clip.",
    )
    group.add_argument(
        "--eps-clip-c",
        type=float,
        help="Dual clip, above 1: bounds the loss of tokens with a negative advantage. Default: off.",
    )
    group.add_argument("--value-clip", type=non_negative_float, default=0.2, help="Clip range of the critic's values.")
    group.add_argument("--entropy-coef", type=float, default=0.0, help="Weight of the entropy bonus.")
    group.add_argument(
        "--calculate-per-token-loss",
        action="store_true",
        help="Average the loss over all trained tokens of the batch, instead of averaging the token means of "
        "responses (samples cut from one response count as one). A sample without trained tokens counts as one token.",
    )
    group.add_argument(
        "--use-rollout-entropy",
        action="store_true",
        help="Also compute the entropy in the log-prob pass, for logging.",
    )


def _add_advantages(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("advantages", "Advantages of tokens from rewards.")
    group.add_argument(
        "--advantage-estimator",
        choices=RegistryChoices(ESTIMATORS),
        default="grpo",
        help="Advantage estimator; ppo trains a critic. Or the import path of your own (docs/customization.md).",
    )
    group.add_argument(
        "--disable-compute-advantages-and-returns",
        dest="compute_advantages_and_returns",
        action="store_false",
        default=True,
        help="Skip advantages, for SFT and other losses that do not use them.",
    )
    group.add_argument("--gamma", type=fraction, default=1.0, help="Discount per token, in [0, 1].")
    group.add_argument("--lambd", type=fraction, default=1.0, help="Lambda of GAE, in [0, 1].")
    group.add_argument("--normalize-advantages", action="store_true", help="Whiten advantages over the whole batch.")
    group.add_argument(
        "--disable-grpo-std-normalization",
        dest="grpo_std_normalization",
        action="store_false",
        default=True,
        help="Subtract the group's mean reward without dividing by its standard deviation (Dr. GRPO).",
    )
    group.add_argument(
        "--disable-rewards-normalization",
        dest="rewards_normalization",
        action="store_false",
        default=True,
        help="Use rewards as they are, without normalizing them within the group.",
    )
    group.add_argument(
        "--num-critic-only-steps",
        type=non_negative_int,
        default=0,
        help="Rollouts at the start that train only the critic.",
    )


def _add_kl(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("KL", "Penalties on the distance from the reference model (--ref-load).")
    group.add_argument(
        "--kl-coef", type=non_negative_float, default=0.0, help="Weight of the KL penalty inside the reward."
    )
    group.add_argument(
        "--use-kl-loss", action="store_true", help="Add a KL term to the loss; loads the reference model."
    )
    group.add_argument(
        "--kl-loss-coef", type=non_negative_float, default=0.0, help="Weight of the KL term of --use-kl-loss."
    )
    group.add_argument("--kl-loss-type", choices=RegistryChoices(KL_KINDS), default="k1", help="KL estimator.")
    group.add_argument("--use-unbiased-kl", action="store_true", help="Weight the KL term by the importance ratio.")
    group.add_argument(
        "--ref-update-interval",
        type=positive_int,
        help="Copy the actor to the reference model every this many rollouts. A resumed run reads the copy from the "
        "checkpoint of that rollout; without one the reference is --ref-load again.",
    )


def _add_off_policy(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "off-policy", "Corrections for log-probs that differ between engine and trainer."
    )
    group.add_argument(
        "--use-rollout-logprobs",
        action="store_true",
        help="Use the engine's log-probs as the old log-probs, instead of the trainer's.",
    )
    group.add_argument(
        "--use-tis", action="store_true", help="Truncated importance sampling between engine and trainer."
    )
    group.add_argument(
        "--tis-clip", type=non_negative_float, default=2.0, help="Upper bound of the weights of --use-tis."
    )
    group.add_argument(
        "--tis-clip-low", type=non_negative_float, default=0, help="Lower bound of the weights of --use-tis."
    )
    group.add_argument(
        "--get-mismatch-metrics",
        action="store_true",
        help="Log the metrics of --custom-tis-function-path without applying it.",
    )
    group.add_argument(
        "--use-opsm", action="store_true", help="Mask sequences that are too far off-policy (--opsm-delta)."
    )
    group.add_argument(
        "--opsm-delta",
        type=float,
        default=1e-4,
        help="--use-opsm masks sequences whose KL, in nats per token, is above this.",
    )
    group.add_argument(
        "--use-routing-replay",
        action=argparse.BooleanOptionalAction,
        help="Training uses the experts that the pass over the old policy chose (docs/routing_replay.md). Default: on "
        "with --use-rollout-routing-replay, else off.",
    )
    group.add_argument(
        "--use-rollout-routing-replay",
        action="store_true",
        help="Old log-probs and training use the experts that the engine chose; implies --use-routing-replay.",
    )


class FrozenPolicy(NamedTuple):
    """A policy that the trainer keeps besides the actor, to compute its log-probs of each rollout."""

    tag: str
    """Tag of its weights, see ``ModelSwitch``."""
    load_arg: str
    """Attribute of the flag that gives the folder, for messages."""
    folder: str
    step_arg: str
    """Attribute of the flag that gives the step, for messages."""
    step: int | None
    """Iteration of a Megatron checkpoint in the folder; None for the latest."""
    timer: str
    """Timer of its passes over a rollout."""


def derive_algorithm(args: Namespace) -> None:
    """Derive defaults from other flags of the loss."""
    if args.eps_clip_high is None:
        args.eps_clip_high = args.eps_clip
    if args.n_samples_per_prompt == 1 and args.grpo_std_normalization:
        # A single sample has no standard deviation to divide by.
        args.grpo_std_normalization = False
    if args.use_routing_replay is None:
        args.use_routing_replay = args.use_rollout_routing_replay


def check_algorithm(args: Namespace) -> Iterator[str]:
    """Yield one message per invalid setting of the loss or of a correction."""
    if (args.loss_type == "custom_loss") != (args.custom_loss_function_path is not None):
        yield (
            f"--loss-type is {args.loss_type} and --custom-loss-function-path is {args.custom_loss_function_path}; "
            "a custom loss needs both --loss-type custom_loss and the path."
        )
    if args.eps_clip_c is not None and args.eps_clip_c <= 1:
        yield f"--eps-clip-c is {args.eps_clip_c}; it must be above 1, or it would clip on-policy tokens."
    if get_estimator(args.advantage_estimator).needs_whitening and not args.normalize_advantages:
        yield f"--advantage-estimator {args.advantage_estimator} needs --normalize-advantages."
    makes_advantages = args.custom_convert_samples_to_train_data_path or args.rollout_data_postprocess_path
    if LOSS_TYPES[args.loss_type].needs_advantages and not (args.compute_advantages_and_returns or makes_advantages):
        yield (
            f"--loss-type {args.loss_type} needs advantages, and --disable-compute-advantages-and-returns leaves "
            "none; drop that flag, or choose --loss-type sft_loss."
        )
    rejects = vars(args).get("use_rs", False)  # a key of --custom-config-path; see MIS in docs/algorithms.md
    if args.custom_tis_function_path is not None and not (args.use_tis or args.get_mismatch_metrics or rejects):
        yield "--custom-tis-function-path is called only with --use-tis or --get-mismatch-metrics; add one of them."
    if args.custom_tis_function_path is None and rejects:
        yield "use_rs of --custom-config-path rejects by what --custom-tis-function-path says; give that path."
    if args.tis_clip_low > args.tis_clip:
        yield f"--tis-clip-low {args.tis_clip_low} is above --tis-clip {args.tis_clip}; the bounds are swapped."
    if args.use_rollout_routing_replay and not args.use_routing_replay:
        yield (
            "--use-routing-replay is false, and --use-rollout-routing-replay replays the experts that the engines "
            "chose; drop one of them."
        )
    records = args.use_routing_replay and not args.use_rollout_routing_replay
    if records and not args.compute_advantages_and_returns:
        yield (
            "--use-routing-replay writes experts down in the pass over the old policy, which "
            "--disable-compute-advantages-and-returns leaves out; drop one of them."
        )


def uses_reference(use_kl_loss: bool, kl_coef: float) -> bool:
    """Return True if the loss or the rewards measure the distance to a reference model."""
    return use_kl_loss or kl_coef != 0


def advise_algorithm(args: Namespace) -> None:
    """Log settings that are valid, but may not be intended."""
    if args.use_critic and args.num_rollout is not None and 0 < args.num_rollout <= args.num_critic_only_steps:
        logger.warning(
            "--num-critic-only-steps %d of %d rollouts: the actor never trains.",
            args.num_critic_only_steps,
            args.num_rollout,
        )
    estimator = get_estimator(args.advantage_estimator)
    if args.kl_coef != 0 and not estimator.uses_kl and args.custom_advantage_function_path is None:
        logger.warning(
            "--kl-coef %g is logged, but takes no part in the advantages of --advantage-estimator %s. To keep the "
            "policy near the reference, use --use-kl-loss and --kl-loss-coef.",
            args.kl_coef,
            args.advantage_estimator,
        )
    is_compared = args.get_mismatch_metrics or vars(args).get("use_rs", False)
    if args.keep_old_actor and args.use_rollout_logprobs and not is_compared:
        logger.warning(
            "--keep-old-actor has no effect with --use-rollout-logprobs: the engine's are the old log-probs."
        )
    for name in ("use_kl_loss", "entropy_coef", "use_tis", "use_opsm") if args.loss_type == "sft_loss" else ():
        if getattr(args, name):
            logger.warning("%s has no effect with --loss-type sft_loss.", flag_of(name))
    if estimator.policy_loss is CISPO and args.eps_clip_c is not None:
        logger.warning("--eps-clip-c has no effect on CISPO, whose weights are bounded from both sides already.")
    if estimator.policy_loss is CISPO and args.eps_clip < 1:
        logger.warning("CISPO bounds its weights from below at 1 - --eps-clip = %g; usual is 0.", 1 - args.eps_clip)


def needs_groups(args: Namespace) -> bool:
    """Return True if a response without others to its prompt has an advantage of 0, and no other loss trains on it."""
    is_training = not (args.debug_rollout_only or args.debug_train_only or args.num_rollout == 0)
    if not is_training or args.loss_type != "policy_loss":
        return False
    plug_ins = (
        "custom_generate_function_path",
        "custom_reward_post_process_path",
        "custom_advantage_function_path",
        "custom_convert_samples_to_train_data_path",
    )
    coefs = args.kl_coef or args.kl_loss_coef or args.entropy_coef
    others = args.advantage_terms or coefs or args.enable_mtp_training
    is_ours = args.rollout_function_path in OWN_ROLLOUTS and not any(getattr(args, name) for name in plug_ins)
    if others or not is_ours or not (args.compute_advantages_and_returns and args.rewards_normalization):
        return False
    baseline = get_estimator(args.advantage_estimator).group_baseline
    if baseline is None:
        return False
    reward = torch.ones(1, dtype=torch.float64)
    return torch.equal(baseline(reward, GroupConfig(divide_by_std=False)).baseline_G, reward)


def derive_group_size(args: Namespace) -> None:
    """Set the responses per prompt of a command that leaves them open."""
    if args.n_samples_per_prompt is None:
        args.n_samples_per_prompt = GROUP_SIZE if needs_groups(args) else 1


def check_groups_of_one(args: Namespace) -> Iterator[str]:
    """Yield a message for groups of one: compared only with itself, a sample has an advantage of 0."""
    if args.n_samples_per_prompt == 1 and needs_groups(args):
        yield (
            f"--n-samples-per-prompt {args.n_samples_per_prompt} with --advantage-estimator "
            f"{args.advantage_estimator}: an answer is compared with the others to its prompt, and there are none, so "
            "that every advantage is 0 and nothing is learnt. Use 2 or more, or --disable-rewards-normalization."
        )


GROUP = FlagGroup(
    add_algorithm_arguments,
    derive=(derive_algorithm,),
    check=(check_algorithm, check_groups_of_one),
    needs=(
        ("kl_loss_coef", "use_kl_loss", "it weights the KL loss"),
        ("use_unbiased_kl", "use_kl_loss", "it weights the KL loss"),
        ("ref_update_interval", "use_kl_loss kl_coef", "nothing else has a reference model"),
        ("get_mismatch_metrics", "custom_tis_function_path", "it logs what that computes"),
        ("enable_mtp_training", "mtp_num_layers", "say how many layers the model has"),
    ),
    excludes=(
        ("kl_coef", "kl_loss_coef", "the KL would count twice"),
        ("use_rollout_logprobs", "use_tis", "with the engine's log-probs as the old ones nothing is left to correct"),
    ),
    advise=(advise_algorithm,),
)
