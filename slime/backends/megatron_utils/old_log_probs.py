"""Whether the log-probs of the policy before training take a forward pass of their own."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator

from slime.algorithms.advantages import get_estimator
from slime.backends.megatron_utils.losses.mismatch import wants_mismatch
from slime.utils.types import RolloutBatch


def needs_old_log_probs(args: Namespace, data: RolloutBatch) -> bool:
    """True when something reads them that the first forward pass of training comes too late for, or differs from.

    With the engine's log-probs as the old ones (``--use-rollout-logprobs``) only a comparison with the trainer's needs
    them.  Otherwise the pass is left out when the forward pass of the one and only optimizer step gives the same
    numbers, and nothing before that step wants to see them.
    """
    if args.use_rollout_logprobs:
        return wants_mismatch(args)
    return next(readers_of_old_log_probs(args, data), None) is not None


def readers_of_old_log_probs(args: Namespace, data: RolloutBatch) -> Iterator[str]:
    """What keeps the pass from being left out, in words."""
    estimator = get_estimator(args.advantage_estimator)
    if len(data["num_microbatches"]) != 1:
        yield "later steps of a rollout compare with the policy before the first"
    if args.loss_type != "policy_loss":
        yield f"--loss-type {args.loss_type} takes none from its own forward pass"
    if args.kl_coef != 0:
        yield "--kl-coef: the penalty is in the rewards"
    if args.use_opd:
        yield "--use-opd: the teacher's pull is in the advantages"
    if estimator.needs_values:
        yield f"--advantage-estimator {args.advantage_estimator}: the critic's rewards"
    if args.custom_advantage_function_path is not None:
        yield "--custom-advantage-function-path may read them"
    if not estimator.policy_loss.may_reuse_log_probs:
        yield f"--advantage-estimator {args.advantage_estimator}: its loss compares sequences"
    if args.keep_old_actor:
        yield "--keep-old-actor: they are those of other weights"
    if args.get_mismatch_metrics:
        yield "--get-mismatch-metrics"
    if args.use_routing_replay and not args.use_rollout_routing_replay:
        yield "--use-routing-replay: the pass records the routes"
    if args.use_rollout_entropy:
        yield "--use-rollout-entropy: the pass computes it"
