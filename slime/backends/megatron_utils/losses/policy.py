"""The policy loss: surrogate, off-policy sequence mask, mismatch correction, entropy, KL loss, in this order."""

from __future__ import annotations

from argparse import Namespace

import torch
from torch import Tensor

from slime.algorithms.advantages import get_estimator
from slime.algorithms.kl import approx_kl
from slime.algorithms.policy_losses import ClipConfig, PolicyLossInputs
from slime.algorithms.policy_losses.opsm import off_policy_sequence_mask
from slime.backends.megatron_utils.losses.columns import (
    Batch,
    LossAndMetrics,
    Reducer,
    TrainedTokens,
    reducer_of,
    response_log_probs,
)
from slime.backends.megatron_utils.losses.mismatch import applies_correction, correct_mismatch, wants_mismatch
from slime.utils.misc import load_function


def policy_loss_function(args: Namespace, batch: Batch, logits: Tensor, sum_of_sample_mean: Reducer) -> LossAndMetrics:
    """``pg_loss - entropy_coef * entropy + kl_loss_coef * kl_loss`` of a micro-batch, each a reduced token loss.

    The surrogate is that of the advantage estimator (``Estimator.policy_loss``).  Old log-probs are the engine's
    (``--use-rollout-logprobs``), those recomputed before training, or the present ones without gradient when a single
    step per rollout makes them equal.

    Metrics of the mismatch count every token that the data train; losses, entropy and KL leave out what the
    correction rejected.
    """
    tokens = TrainedTokens(batch)
    log_probs, entropies = response_log_probs(args, batch, logits, with_entropy=True)
    log_prob_N, entropy_T = tokens.only(log_probs), torch.cat(tokens.only(entropies))
    train_N = batch.get("log_probs")  # of the weights before training
    train_N = [log_prob.detach() for log_prob in log_prob_N] if train_N is None else tokens.only(train_N)
    rollout_N = None if batch.get("rollout_log_probs") is None else tokens.only(batch["rollout_log_probs"])
    old_N = train_N
    if args.use_rollout_logprobs:
        old_N = tokens.required("rollout_log_probs", "--use-rollout-logprobs needs log-probs")
    advantage_N = tokens.required("advantages", f"--loss-type {args.loss_type} needs advantages")

    # The loss of each token
    surrogate = get_estimator(args.advantage_estimator).policy_loss.compute(
        PolicyLossInputs(
            log_prob_N=log_prob_N,
            old_log_prob_N=old_N,
            advantage_N=advantage_N,
            mask_N=batch["loss_masks"],
            gather=tokens.whole,
        ),
        ClipConfig(low=args.eps_clip, high=args.eps_clip_high, dual=args.eps_clip_c),
    )
    loss_T = surrogate.loss_T
    metrics_T = {"pg_clipfrac": surrogate.clipped_T, "ppo_kl": -surrogate.log_ratio_T.detach()}
    if args.use_opsm:
        keep_T = off_policy_sequence_mask(
            tokens.whole([log_prob.detach() for log_prob in log_prob_N]),
            tokens.whole(old_N),
            batch["loss_masks"],
            advantage_N,
            delta=args.opsm_delta,
        )
        loss_T = torch.where(keep_T != 0, loss_T, 0.0)
        metrics_T["opsm_clipfrac"] = 1 - keep_T
    reduce, loss_masks = sum_of_sample_mean, batch["loss_masks"]
    if wants_mismatch(args):
        recorded_N = tokens.required("rollout_log_probs", "--use-tis and --get-mismatch-metrics need log-probs")
        corrected = correct_mismatch(args, batch, loss_T, train_N, recorded_N)
        metrics_T |= corrected.metrics_T
        if applies_correction(args):
            loss_T, loss_masks = corrected.loss_T, corrected.loss_masks
            reduce = reducer_of(args, batch, loss_masks)

    # The loss of the micro-batch
    reduce_loss = reduce
    if args.custom_pg_loss_reducer_function_path is not None:
        custom = load_function(args.custom_pg_loss_reducer_function_path)
        lengths = batch["total_lengths"], batch["response_lengths"]
        reduce_loss = custom(*lengths, loss_masks, args.calculate_per_token_loss)
    pg_loss, entropy = reduce_loss(loss_T), reduce(entropy_T)
    loss = pg_loss - args.entropy_coef * entropy
    metrics = {"pg_loss": pg_loss, "entropy_loss": entropy}
    if args.use_kl_loss:
        log_prob_T, reference_N = (
            torch.cat(log_prob_N),
            tokens.required("ref_log_probs", "--use-kl-loss needs log-probs"),
        )
        ratio_T = (log_prob_T - torch.cat(old_N)).exp() if args.use_unbiased_kl else None
        metrics["kl_loss"] = reduce(approx_kl(log_prob_T, torch.cat(reference_N), args.kl_loss_type, ratio_T))
        loss = loss + args.kl_loss_coef * metrics["kl_loss"]

    if rollout_N is not None:
        ours_N = log_prob_N if args.use_rollout_logprobs else old_N
        metrics_T["train_rollout_logprob_abs_diff"] = (torch.cat(ours_N).detach() - torch.cat(rollout_N)).abs()
    metrics |= {name: sum_of_sample_mean(values_T) for name, values_T in metrics_T.items()}
    return loss, {"loss": loss, **metrics}
