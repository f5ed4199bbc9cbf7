"""The loss of a packed micro-batch: policy, value, SFT or the user's own.

Formulas are in ``slime.algorithms``; here a batch is turned into their arguments, the per-token results are reduced,
and the scalar is scaled so that Megatron's own averaging gives the mean of the step.

Every loss function is called as ``f(args, batch, logits, sum_of_sample_mean)`` and returns the reduced loss and a
dict of reduced metrics: sums over this rank's samples, which ``train_metrics`` adds up and divides.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from slime.backends.megatron_utils import cpu_platform  # noqa: F401

# isort: split
from megatron.core import mpu

from slime.algorithms.kl import approx_kl
from slime.algorithms.off_policy import MismatchBounds, icepop, truncated_importance_sampling
from slime.algorithms.policy_losses.cispo import cispo_loss
from slime.algorithms.policy_losses.gspo import sequence_log_ratio, spread_over_tokens
from slime.algorithms.policy_losses.opsm import off_policy_sequence_mask
from slime.algorithms.policy_losses.ppo_clip import ClipConfig, clipped_policy_loss
from slime.algorithms.reduction import num_loss_tokens, scale_for_megatron
from slime.algorithms.value_loss import clipped_value_loss
from slime.backends.megatron_utils.advantages import compute_advantages_and_returns
from slime.backends.megatron_utils.cp_utils import all_gather_with_cp, get_sum_of_sample_mean
from slime.backends.megatron_utils.layers.mtp import LogitsAndMtp
from slime.backends.megatron_utils.layers.mtp_loss import mtp_loss
from slime.backends.megatron_utils.log_probs import get_log_probs_and_entropy, get_values
from slime.utils.errors import ConfigError, DataError
from slime.utils.misc import load_function

__all__ = [
    "compute_advantages_and_returns",
    "get_log_probs_and_entropy",
    "get_values",
    "icepop_function",
    "loss_function",
    "policy_loss_function",
    "sft_loss_function",
    "value_loss_function",
    "vanilla_tis_function",
]

Reducer = Callable[[Tensor], Tensor]
Batch = dict[str, Any]
LossAndMetrics = tuple[Tensor, dict[str, Tensor]]


def _log_probs(
    args: Namespace, batch: Batch, logits: Tensor, *, with_entropy: bool
) -> tuple[list[Tensor], list[Tensor]]:
    _, result = get_log_probs_and_entropy(
        logits,
        args=args,
        unconcat_tokens=batch["unconcat_tokens"],
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
        with_entropy=with_entropy,
        top_p_token_ids=batch.get("rollout_top_p_token_ids"),
        top_p_token_offsets=batch.get("rollout_top_p_token_offsets"),
        # These losses read nothing else of the logits, which the output layer does not need in its backward pass.
        overwrite_logits=True,
    )
    return result["log_probs"], result.get("entropy", [])


# Corrections for the mismatch between engine and trainer


def vanilla_tis_function(
    args: Namespace,
    *,
    pg_loss: Tensor,
    train_log_probs: Sequence[Tensor],
    rollout_log_probs: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
    **_: Any,
) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
    """Truncated importance sampling: the loss of a token times its weight, cut to ``--tis-clip-low .. --tis-clip``."""
    return _corrected(truncated_importance_sampling, args, pg_loss, train_log_probs, rollout_log_probs, loss_masks)


def icepop_function(
    args: Namespace,
    *,
    pg_loss: Tensor,
    train_log_probs: Sequence[Tensor],
    rollout_log_probs: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
    **_: Any,
) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
    """IcePop, for --custom-tis-function-path: a token whose weight leaves the bounds of --tis-clip is dropped."""
    return _corrected(icepop, args, pg_loss, train_log_probs, rollout_log_probs, loss_masks)


def _corrected(
    correction: Callable[..., tuple[Tensor, dict[str, Tensor]]],
    args: Namespace,
    pg_loss: Tensor,
    train_log_probs: Sequence[Tensor],
    rollout_log_probs: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
    bounds = MismatchBounds(low=args.tis_clip_low, high=args.tis_clip)
    loss, metrics = correction(pg_loss, torch.cat(list(train_log_probs)), torch.cat(list(rollout_log_probs)), bounds)
    return loss, list(loss_masks), metrics


# The four losses


def policy_loss_function(args: Namespace, batch: Batch, logits: Tensor, sum_of_sample_mean: Reducer) -> LossAndMetrics:
    """GRPO, GSPO, CISPO, REINFORCE++ and PPO's actor: the surrogate, less entropy, plus the KL loss.

    Old log-probs are the engine's (``--use-rollout-logprobs``), those recomputed before training, or the present ones
    without gradient when a single step per rollout makes them equal.
    """
    advantage_T = torch.cat(batch["advantages"])
    log_probs, entropies = _log_probs(args, batch, logits, with_entropy=True)
    log_prob_T, entropy_T = torch.cat(log_probs), torch.cat(entropies)
    rollout_log_probs = batch.get("rollout_log_probs")
    if args.use_rollout_logprobs:
        old_log_probs = _required(rollout_log_probs, "--use-rollout-logprobs")
    else:
        old_log_probs = batch.get("log_probs") or [log_prob.detach() for log_prob in log_probs]
    old_T = torch.cat(old_log_probs)

    loss_T, metrics_T = _surrogate(args, batch, log_probs, old_log_probs, advantage_T)
    metrics: dict[str, Tensor] = {}
    reduce_loss = sum_of_sample_mean
    if args.use_opsm:
        keep_T = _opsm(args, batch, log_probs, old_log_probs)
        loss_T = loss_T * keep_T
        metrics_T["opsm_clipfrac"] = 1 - keep_T
    if args.use_tis or args.get_mismatch_metrics:
        corrected_T, masks, tis_T = _mismatch(args, batch, loss_T, old_log_probs)
        metrics_T |= tis_T
        if args.use_tis:
            loss_T = corrected_T
            # The denominators stay those of the unmodified masks.
            reduce_loss = sum_of_sample_mean = _reducer(args, batch, masks)
    if args.custom_pg_loss_reducer_function_path is not None:
        custom = load_function(args.custom_pg_loss_reducer_function_path)
        masks = masks if args.use_tis else batch["loss_masks"]
        reduce_loss = custom(batch["total_lengths"], batch["response_lengths"], masks, args.calculate_per_token_loss)

    pg_loss = reduce_loss(loss_T)
    entropy = sum_of_sample_mean(entropy_T)
    loss = pg_loss - args.entropy_coef * entropy
    metrics |= {"pg_loss": pg_loss, "entropy_loss": entropy}
    if args.use_kl_loss:
        ratio_T = (log_prob_T - old_T).exp() if args.use_unbiased_kl else None
        reference_T = torch.cat(_required(batch.get("ref_log_probs"), "--use-kl-loss"))
        metrics["kl_loss"] = sum_of_sample_mean(approx_kl(log_prob_T, reference_T, args.kl_loss_type, ratio_T))
        loss = loss + args.kl_loss_coef * metrics["kl_loss"]
    metrics |= {name: sum_of_sample_mean(value_T) for name, value_T in metrics_T.items()}
    if rollout_log_probs is not None:
        ours_T = log_prob_T if args.use_rollout_logprobs else old_T
        difference_T = (ours_T.detach() - torch.cat(rollout_log_probs)).abs()
        metrics["train_rollout_logprob_abs_diff"] = sum_of_sample_mean(difference_T)
    return loss, {"loss": loss, **metrics}


def _surrogate(
    args: Namespace, batch: Batch, log_probs: list[Tensor], old_log_probs: list[Tensor], advantage_T: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Per-token policy loss, and the metrics ``pg_clipfrac`` and ``ppo_kl``."""
    clip = ClipConfig(low=args.eps_clip, high=args.eps_clip_high, dual=args.eps_clip_c)
    log_prob_T, old_T = torch.cat(log_probs), torch.cat(old_log_probs)
    if args.advantage_estimator == "gspo":
        sequence_N = sequence_log_ratio(_whole(batch, log_probs), _whole(batch, old_log_probs), batch["loss_masks"])
        log_ratio_T = spread_over_tokens(sequence_N, [len(log_prob) for log_prob in log_probs])
    else:
        log_ratio_T = log_prob_T - old_T
    if args.advantage_estimator == "cispo":
        loss_T, clipped_T = cispo_loss(log_ratio_T, log_prob_T, advantage_T, clip)
    else:
        loss_T, clipped_T = clipped_policy_loss(log_ratio_T, advantage_T, clip)
    return loss_T, {"pg_clipfrac": clipped_T, "ppo_kl": -log_ratio_T.detach()}


def _whole(batch: Batch, column: list[Tensor]) -> list[Tensor]:
    """The column's response tensors, gathered over context-parallel ranks."""
    lengths = zip(batch["total_lengths"], batch["response_lengths"], strict=True)
    return [all_gather_with_cp(tensor, *length) for tensor, length in zip(column, lengths, strict=True)]


def _opsm(args: Namespace, batch: Batch, log_probs: list[Tensor], old_log_probs: list[Tensor]) -> Tensor:
    return off_policy_sequence_mask(
        _whole(batch, [log_prob.detach() for log_prob in log_probs]),
        _whole(batch, old_log_probs),
        batch["loss_masks"],
        batch["advantages"],
        delta=args.opsm_delta,
    )


def _mismatch(
    args: Namespace, batch: Batch, loss_T: Tensor, old_log_probs: list[Tensor]
) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
    """The corrected loss, the corrected masks and per-token metrics, among them ``ois``, the plain mean weight."""
    rollout_log_probs = _required(batch.get("rollout_log_probs"), "--use-tis and --get-mismatch-metrics")
    if args.custom_tis_function_path is not None:
        correct = load_function(args.custom_tis_function_path)
    else:
        correct = vanilla_tis_function
    corrected_T, masks, metrics_T = correct(
        args=args,
        pg_loss=loss_T,
        train_log_probs=old_log_probs,
        rollout_log_probs=rollout_log_probs,
        loss_masks=batch["loss_masks"],
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
    )
    weight_T = (torch.cat(old_log_probs) - torch.cat(rollout_log_probs)).exp()
    return corrected_T, masks, {"ois": weight_T, **metrics_T}


def _required(column: list[Tensor] | None, flag: str) -> list[Tensor]:
    if column is None:
        raise DataError(
            f"{flag} needs log-probs that the samples do not have: the engine's come from the rollout function "
            "(rollout_log_probs), the reference's from --ref-load"
        )
    return column


def value_loss_function(args: Namespace, batch: Batch, logits: Tensor, sum_of_sample_mean: Reducer) -> LossAndMetrics:
    """The critic's clipped regression towards the returns."""
    _, result = get_values(
        logits,
        args=args,
        unconcat_tokens=batch["unconcat_tokens"],
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
    )
    loss_T, clipped_T = clipped_value_loss(
        torch.cat(result["values"]), torch.cat(batch["values"]), torch.cat(batch["returns"]), clip=args.value_clip
    )
    loss = sum_of_sample_mean(loss_T)
    return loss, {"value_loss": loss, "value_clipfrac": sum_of_sample_mean(clipped_T)}


def sft_loss_function(args: Namespace, batch: Batch, logits: Tensor, sum_of_sample_mean: Reducer) -> LossAndMetrics:
    """Negative log-likelihood of the response."""
    log_probs, _ = _log_probs(args, batch, logits, with_entropy=False)
    loss = -sum_of_sample_mean(torch.cat(log_probs))
    return loss, {"loss": loss}


def custom_loss_function(args: Namespace, batch: Batch, logits: Tensor, sum_of_sample_mean: Reducer) -> LossAndMetrics:
    """The function of ``--custom-loss-function-path``, which sees fp32 logits."""
    if args.custom_loss_function_path is None:
        raise ConfigError("--loss-type custom_loss needs --custom-loss-function-path")
    loss, metrics = load_function(args.custom_loss_function_path)(args, batch, logits.float(), sum_of_sample_mean)
    return loss, {"loss": loss, **metrics}


LOSSES: dict[str, Callable[..., LossAndMetrics]] = {
    "policy_loss": policy_loss_function,
    "value_loss": value_loss_function,
    "sft_loss": sft_loss_function,
    "custom_loss": custom_loss_function,
}
"""By ``--loss-type``; ``value_loss`` is the critic's."""


# From a loss to what Megatron's schedules want


def _reducer(args: Namespace, batch: Batch, loss_masks: Sequence[Tensor]) -> Reducer:
    return get_sum_of_sample_mean(
        batch["total_lengths"],
        batch["response_lengths"],
        loss_masks,
        batch["rollout_mask_sums"],
        args.calculate_per_token_loss,
    )


def loss_function(
    args: Namespace,
    batch: Batch,
    num_microbatches: int,
    step_global_batch_size: int,
    loss_type: str,
    logits: Tensor | LogitsAndMtp,
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Loss of one micro-batch, scaled for Megatron's averaging; see ``algorithms.reduction.scale_for_megatron``.

    Args:
        args: the run's arguments.
        batch: a batch of ``data.get_batch``.
        num_microbatches: micro-batches of the step on this rank.
        step_global_batch_size: rollouts of the step on all ranks.
        loss_type: key of :data:`LOSSES`.
        logits: the model's output, [1, T, V], with the log-probs of its MTP layers when these are trained.

    Returns:
        the scaled loss, Megatron's normaliser (1, or the number of trained tokens with
        ``--calculate-per-token-loss``), and ``{"names": [...], "values": [trained tokens, metric, ...]}``.
    """
    mtp_log_probs: list[Tensor] = []
    if isinstance(logits, LogitsAndMtp):
        logits, mtp_log_probs = logits
    reducer = _reducer(args, batch, batch["loss_masks"])
    function = LOSSES[loss_type]
    if args.recompute_loss_function:
        loss, metrics = checkpoint(function, args, batch, logits, reducer, use_reentrant=False)
    else:
        loss, metrics = function(args, batch, logits, reducer)
    if not loss.requires_grad and torch.is_grad_enabled():
        loss = loss + 0 * logits.sum()  # a rank without response tokens takes part in the backward pass all the same
    if mtp_log_probs:
        ahead, ahead_metrics = mtp_loss(batch["mtp_inputs"].depths, mtp_log_probs)
        loss = loss + args.mtp_loss_scaling_factor * ahead
        metrics = {**metrics, **ahead_metrics}
    num_tokens = num_loss_tokens(batch["loss_masks"])
    scaled = scale_for_megatron(
        loss,
        per_token=args.calculate_per_token_loss,
        num_microbatches=num_microbatches,
        step_global_batch_size=step_global_batch_size,
        dp_size=mpu.get_data_parallel_world_size(),
        cp_size=mpu.get_context_parallel_world_size(),
    )
    normaliser = num_tokens.int() if args.calculate_per_token_loss else torch.ones_like(num_tokens, dtype=torch.int)
    values = torch.stack([num_tokens.float(), *(value.detach().float() for value in metrics.values())])
    return scaled, normaliser, {"names": list(metrics), "values": values}
