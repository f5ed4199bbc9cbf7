"""Flags of the policy gradient: advantages, clipping, KL, corrections for the trainer/engine mismatch."""

from __future__ import annotations

import argparse

from slime.algorithms.advantages import ESTIMATORS
from slime.algorithms.kl import KL_KINDS
from slime.algorithms.loss_types import ACTOR_LOSS_TYPES
from slime.arguments.choices import RegistryChoices
from slime.arguments.kinds import non_negative_float, non_negative_int, number_in, positive_int


def add_algorithm_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the loss, advantage, KL and off-policy groups to ``parser``."""
    _add_loss(parser)
    _add_advantages(parser)
    _add_kl(parser)
    _add_off_policy(parser)


def _add_loss(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("loss", "What an optimizer step minimises.")
    group.add_argument("--loss-type", choices=ACTOR_LOSS_TYPES, default="policy_loss", help="Which loss.")
    group.add_argument(
        "--eps-clip", type=non_negative_float, default=0.2, help="Ratios below 1 minus this gain nothing."
    )
    group.add_argument(
        "--eps-clip-high",
        type=non_negative_float,
        default=None,
        help="Ratios above 1 plus this gain nothing. Default: --eps-clip.",
    )
    group.add_argument(
        "--eps-clip-c",
        type=float,
        default=None,
        help="Dual clip, above 1: bounds the loss of bad tokens. Default off.",
    )
    group.add_argument(
        "--value-clip", type=non_negative_float, default=0.2, help="Trust region of the critic's values."
    )
    group.add_argument("--entropy-coef", type=float, default=0.0, help="Weight of the entropy bonus.")
    group.add_argument(
        "--calculate-per-token-loss",
        action="store_true",
        help="Mean over all tokens of the batch, instead of the mean over samples of their token means.",
    )
    group.add_argument(
        "--use-rollout-entropy", action="store_true", help="Also compute the entropy in the log-prob pass, for logs."
    )


def _add_advantages(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("advantages", "From rewards to the weight of each token.")
    group.add_argument(
        "--advantage-estimator",
        choices=RegistryChoices(ESTIMATORS),
        default="grpo",
        help="Which estimator; ppo has a critic. Or the import path of your own (docs/customization.md).",
    )
    group.add_argument(
        "--disable-compute-advantages-and-returns",
        dest="compute_advantages_and_returns",
        action="store_false",
        default=True,
        help="Skip advantages; for SFT and losses that use none.",
    )
    group.add_argument("--gamma", type=number_in(0.0, 1.0), default=1.0, help="Discount per token, in [0, 1].")
    group.add_argument("--lambd", type=number_in(0.0, 1.0), default=1.0, help="Lambda of GAE, in [0, 1].")
    group.add_argument("--normalize-advantages", action="store_true", help="Whiten advantages over the whole batch.")
    group.add_argument(
        "--disable-grpo-std-normalization",
        dest="grpo_std_normalization",
        action="store_false",
        default=True,
        help="Subtract the group's mean reward, but do not divide by its deviation (Dr. GRPO).",
    )
    group.add_argument(
        "--disable-rewards-normalization",
        dest="rewards_normalization",
        action="store_false",
        default=True,
        help="Use rewards as they are, without the group's mean and deviation.",
    )
    group.add_argument(
        "--num-critic-only-steps", type=non_negative_int, default=0, help="First rollouts that train only the critic."
    )


def _add_kl(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("KL", "How the policy is held near the reference model (--ref-load).")
    group.add_argument(
        "--kl-coef", type=non_negative_float, default=0.0, help="Weight of the KL penalty inside the reward."
    )
    group.add_argument("--use-kl-loss", action="store_true", help="Add a KL term to the loss; loads the reference.")
    group.add_argument("--kl-loss-coef", type=non_negative_float, default=0.0, help="Weight of that term.")
    group.add_argument("--kl-loss-type", choices=RegistryChoices(KL_KINDS), default="k1", help="Estimator of the KL.")
    group.add_argument("--use-unbiased-kl", action="store_true", help="Weight the KL term by the importance ratio.")
    group.add_argument(
        "--ref-update-interval",
        type=positive_int,
        default=None,
        help="Rollouts after which the reference becomes the actor.",
    )


def _add_off_policy(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("off-policy", "Corrections where the engine and the trainer disagree.")
    group.add_argument(
        "--use-rollout-logprobs", action="store_true", help="Take the old log-probs from the engine, not the trainer."
    )
    group.add_argument(
        "--use-tis", action="store_true", help="Truncated importance sampling between engine and trainer."
    )
    group.add_argument("--tis-clip", type=non_negative_float, default=2.0, help="Upper bound of its weights.")
    group.add_argument("--tis-clip-low", type=non_negative_float, default=0, help="Lower bound of its weights.")
    group.add_argument(
        "--get-mismatch-metrics",
        action="store_true",
        help="Log the metrics of --custom-tis-function-path without applying it.",
    )
    group.add_argument("--use-opsm", action="store_true", help="Mask whole sequences that drifted too far off-policy.")
    group.add_argument(
        "--opsm-delta", type=float, default=1e-4, help="KL (nats per token) above which they are masked."
    )
    group.add_argument(
        "--use-routing-replay",
        action="store_true",
        help="Training uses the experts that the pass over the old policy chose (docs/routing_replay.md).",
    )
    group.add_argument(
        "--use-rollout-routing-replay",
        action="store_true",
        help="Old log-probs and training use the experts that the engine chose; implies --use-routing-replay.",
    )
