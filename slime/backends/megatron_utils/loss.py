"""The losses: from the logits of a packed micro-batch to the scalar that Megatron's schedules minimise.

``loss_function`` runs the loss of ``--loss-type`` (:data:`LOSSES`) and scales it.  Every loss is called as
``f(args, batch, logits, sum_of_sample_mean)`` and returns the reduced loss and a dict of reduced metrics: sums over
this rank's samples, which ``train_metrics`` adds up and divides.  The formulas are in ``slime.algorithms``.

Plug-ins import the losses, the mismatch corrections and ``compute_advantages_and_returns`` from here.

Shapes: N = samples; R = response tokens of a sample; r = those on this context-parallel rank; T = the r of all samples
concatenated.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core import mpu
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from slime.algorithms.advantages import get_estimator
from slime.algorithms.kl import approx_kl
from slime.algorithms.off_policy import TOKEN_CORRECTIONS, MismatchBounds
from slime.algorithms.off_policy.token_weights import importance_weight
from slime.algorithms.policy_losses import ClipConfig, PolicyLossInputs
from slime.algorithms.policy_losses.opsm import off_policy_sequence_mask
from slime.algorithms.reduction import Reducer, num_loss_tokens, scale_for_megatron
from slime.algorithms.value_loss import clipped_value_loss
from slime.backends.megatron_utils.advantages import compute_advantages_and_returns
from slime.backends.megatron_utils.cp_utils import get_sum_of_sample_mean, local_responses, whole_responses
from slime.backends.megatron_utils.layers.mtp import LogitsAndMtp, mtp_loss
from slime.backends.megatron_utils.log_probs import get_log_probs_and_entropy, get_values, reader_columns
from slime.utils.errors import DataError
from slime.utils.misc import accepted, call_hook, load_function
from slime.utils.plugins import PluginCall, call_plugin

Batch = dict[str, Any]
LossAndMetrics = tuple[Tensor, dict[str, Tensor]]


class TrainedTokens:
    """Reads the columns of one micro-batch, with 0 for every token that is not trained.

    Column values of untrained tokens are undefined: tool output, for example, has no old log-prob.  They are replaced
    with ``torch.where`` rather than multiplied by the mask, so NaN and infinity reach neither the loss nor the
    gradient.
    """

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        masks = local_responses(batch["loss_masks"], batch["total_lengths"], batch["response_lengths"])
        self._sizes = [len(mask) for mask in masks]
        self._is_trained_T = torch.cat(masks) != 0

    def only(self, column_N: Sequence[Tensor]) -> list[Tensor]:
        """Return the column with untrained tokens set to 0: [r] per sample.

        Raises:
            DataError: an entry's length is not the number of its sample's response tokens on this rank.
        """
        sizes = [len(values) for values in column_N]
        if sizes != self._sizes:
            raise DataError(f"a column has {sizes} entries for {self._sizes} response tokens of the samples here")
        return list(torch.where(self._is_trained_T, torch.cat(list(column_N)), 0.0).split(sizes))

    def required(self, name: str, why: str) -> list[Tensor]:
        """Return the column ``name`` as :meth:`only` does.

        Raises:
            DataError: the batch does not have it; ``why`` begins the message.
        """
        column_N = self.batch.get(name)
        if column_N is None:
            raise DataError(f"{why}, and the samples have none. {_ORIGINS[name]}")
        return self.only(column_N)

    def whole(self, column_N: Sequence[Tensor]) -> list[Tensor]:
        """Gather whole responses over context-parallel ranks: [R] per sample.  Differentiable, collective."""
        return whole_responses(column_N, self.batch["total_lengths"], self.batch["response_lengths"])


_ORIGINS = {
    "advantages": "They are computed before training: drop --disable-compute-advantages-and-returns.",
    "rollout_log_probs": "The engine's log-probs come from the rollout function (sample.rollout_log_probs).",
    "ref_log_probs": "They come from a forward pass of the reference model: check --ref-load.",
    "values": "They come from the critic: --advantage-estimator ppo.",
    "returns": "They are computed before training: drop --disable-compute-advantages-and-returns.",
}
"""Where each column comes from, for the message that it is missing."""


def reducer_of(batch: Batch, loss_masks: Sequence[Tensor], *, per_token: bool) -> Reducer:
    """Return ``reduction.sum_of_sample_means`` over ``loss_masks`` ([R] each).

    The denominators are the batch's ``rollout_mask_sums``, whatever ``loss_masks`` leaves out.
    """
    return get_sum_of_sample_mean(
        batch["total_lengths"],
        batch["response_lengths"],
        loss_masks,
        batch["rollout_mask_sums"],
        per_token,
    )


__all__ = [
    "LOSSES",
    "compute_advantages_and_returns",
    "custom_loss_function",
    "get_log_probs_and_entropy",
    "get_values",
    "icepop_function",
    "loss_function",
    "policy_loss_function",
    "sft_loss_function",
    "value_loss_function",
    "vanilla_tis_function",
]


def policy_loss_function(args: Namespace, batch: Batch, logits: Tensor, sum_of_sample_mean: Reducer) -> LossAndMetrics:
    """Compute ``pg_loss - entropy_coef * entropy + kl_loss_coef * kl_loss`` of a micro-batch, plus guides' loss terms.

    The advantage estimator defines the surrogate (``Estimator.policy_loss``).  The old log-probs are the engine's
    (``--use-rollout-logprobs``), those recomputed before training, or the current ones without gradient when a single
    step per rollout makes them equal.

    Losses, entropy and KL leave out tokens that the mismatch correction rejected; all other metrics count every
    trained token.
    """
    tokens = TrainedTokens(batch)
    # Overwriting is safe: neither this loss nor the output layer's backward pass reads the logits again.
    _, result = get_log_probs_and_entropy(
        logits, args=args, with_entropy=True, **reader_columns(batch), overwrite_logits=True
    )
    log_probs = result["log_probs"]
    log_prob_N, entropy_T = tokens.only(log_probs), torch.cat(tokens.only(result["entropy"]))
    train_N, old_N = _earlier_log_probs(batch, tokens, log_prob_N, takes_engines=args.use_rollout_logprobs)
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
    if (kept := batch.get("kept")) is not None:
        kept["trainer_log_probs"] = [log_prob.detach() for log_prob in log_probs]
        kept["clipped"] = list(surrogate.clipped_T.split([len(log_prob) for log_prob in log_probs]))
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
    is_corrected = applies_correction(args)
    if is_corrected or args.get_mismatch_metrics:
        recorded_N = tokens.required("rollout_log_probs", "--use-tis and --get-mismatch-metrics need log-probs")
        corrected_T, kept_masks, mismatch_T = correct_mismatch(args, batch, loss_T, train_N, recorded_N, log_prob_N)
        metrics_T |= mismatch_T
        if is_corrected:
            loss_T, loss_masks = corrected_T, kept_masks
            reduce = reducer_of(batch, loss_masks, per_token=args.calculate_per_token_loss)

    # The loss of the micro-batch
    reduce_loss = reduce
    if path := args.custom_pg_loss_reducer_function_path:
        columns = batch["total_lengths"], batch["response_lengths"], loss_masks
        flag = "--custom-pg-loss-reducer-function-path"
        reduce_loss = call_hook(flag, path, *columns, args.calculate_per_token_loss)
    pg_loss, entropy = reduce_loss(loss_T), reduce(entropy_T)
    loss = pg_loss - args.entropy_coef * entropy
    metrics = {"pg_loss": pg_loss, "entropy_loss": entropy}
    if args.use_kl_loss:
        log_prob_T = torch.cat(log_prob_N)
        reference_N = tokens.required("ref_log_probs", "--use-kl-loss needs log-probs")
        ratio_T = (log_prob_T - torch.cat(old_N)).exp() if args.use_unbiased_kl else None
        metrics["kl_loss"] = reduce(approx_kl(log_prob_T, torch.cat(reference_N), args.kl_loss_type, ratio_T))
        loss = loss + args.kl_loss_coef * metrics["kl_loss"]

    for term in batch.get("loss_terms", ()):
        name, weight, value_N = term(batch, logits, log_probs)
        metrics[name] = reduce(torch.cat(tokens.only(value_N)))
        loss = loss + weight * metrics[name]

    if (rollout_N := batch.get("rollout_log_probs")) is not None:
        ours_T, rollout_T = torch.cat(log_prob_N if args.use_rollout_logprobs else old_N), tokens.only(rollout_N)
        metrics_T["train_rollout_logprob_abs_diff"] = (ours_T.detach() - torch.cat(rollout_T)).abs()
    metrics |= {name: sum_of_sample_mean(values_T) for name, values_T in metrics_T.items()}
    return loss, {"loss": loss, **metrics}


def _earlier_log_probs(
    batch: Batch, tokens: TrainedTokens, log_prob_N: list[Tensor], *, takes_engines: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the log-probs under the weights before training, and the denominator of the ratio: [r] per sample."""
    train_N = batch.get("log_probs")
    train_N = [log_prob.detach() for log_prob in log_prob_N] if train_N is None else tokens.only(train_N)
    if takes_engines:
        return train_N, tokens.required("rollout_log_probs", "--use-rollout-logprobs needs log-probs")
    return train_N, train_N


def value_loss_function(args: Namespace, batch: Batch, logits: Tensor, sum_of_sample_mean: Reducer) -> LossAndMetrics:
    """Compute the critic's clipped regression loss against the returns."""
    tokens = TrainedTokens(batch)
    _, result = get_values(logits, args=args, **reader_columns(batch))
    loss_T, clipped_T = clipped_value_loss(
        torch.cat(tokens.only(result["values"])),
        torch.cat(tokens.required("values", "the value loss needs the values from before training")),
        torch.cat(tokens.required("returns", "the value loss needs returns")),
        clip=args.value_clip,
    )
    loss = sum_of_sample_mean(loss_T)
    return loss, {"value_loss": loss, "value_clipfrac": sum_of_sample_mean(clipped_T)}


def sft_loss_function(args: Namespace, batch: Batch, logits: Tensor, sum_of_sample_mean: Reducer) -> LossAndMetrics:
    """Compute the negative log-likelihood of the trained tokens of the response."""
    _, result = get_log_probs_and_entropy(logits, args=args, **reader_columns(batch), overwrite_logits=True)
    loss = -sum_of_sample_mean(torch.cat(TrainedTokens(batch).only(result["log_probs"])))
    return loss, {"loss": loss}


def custom_loss_function(args: Namespace, batch: Batch, logits: Tensor, sum_of_sample_mean: Reducer) -> LossAndMetrics:
    """Call the function of ``--custom-loss-function-path`` with fp32 logits and unmasked columns."""
    path = args.custom_loss_function_path
    loss, metrics = call_hook("--custom-loss-function-path", path, args, batch, logits.float(), sum_of_sample_mean)
    return loss, {"loss": loss, **metrics}


LOSSES: dict[str, Callable[..., LossAndMetrics]] = {
    "policy_loss": policy_loss_function,
    "value_loss": value_loss_function,
    "sft_loss": sft_loss_function,
    "custom_loss": custom_loss_function,
}
"""Loss functions by ``--loss-type``; ``value_loss`` is the critic's.  ``slime.flags.algorithm`` has the same names."""


def loss_function(
    args: Namespace,
    batch: Batch,
    num_microbatches: int,
    step_global_batch_size: int,
    loss_type: str,
    logits: Tensor | LogitsAndMtp,
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Compute the loss of one micro-batch, scaled for Megatron's averaging
    (``algorithms.reduction.scale_for_megatron``).

    Args:
        step_global_batch_size: rollouts in the step, over all ranks.
        loss_type: key of :data:`LOSSES`.
        logits: the model's output [1, packed tokens, vocabulary shard], with the log-probs of the MTP layers when
            these are trained.

    Returns:
        the scaled loss, Megatron's normaliser (1, or the number of trained tokens with
        ``--calculate-per-token-loss``), and ``{"names": [...], "values": [trained tokens, metric, ...]}``.
    """
    mtp_log_probs: list[Tensor] = []
    if isinstance(logits, LogitsAndMtp):
        logits, mtp_log_probs = logits
    reducer = reducer_of(batch, batch["loss_masks"], per_token=args.calculate_per_token_loss)
    function = LOSSES[loss_type]
    if args.recompute_loss_function:
        loss, metrics = checkpoint(function, args, batch, logits, reducer, use_reentrant=False)
    else:
        loss, metrics = function(args, batch, logits, reducer)
    if not loss.requires_grad and torch.is_grad_enabled():
        # A rank without response tokens must still run the backward pass: its collectives need every rank.
        loss = loss + 0 * logits.flatten()[0]
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
    numbers = (num_tokens, *metrics.values())  # a custom loss may give plain numbers
    values = torch.stack([torch.as_tensor(n, dtype=torch.float32, device=num_tokens.device).detach() for n in numbers])
    return scaled, normaliser, {"names": list(metrics), "values": values}


# Corrections of the policy loss for the mismatch between the engine's sampling probabilities and the trainer's.
# ``--use-tis`` calls ``vanilla_tis_function``, or the function of ``--custom-tis-function-path``: ``icepop_function``,
# MIS of examples/train_infer_mismatch_helper, or a user's own.  Formulas: ``slime.algorithms.off_policy``.


def applies_correction(args: Namespace) -> bool:
    """Return True if the correction changes the loss; ``--get-mismatch-metrics`` alone only measures.

    ``use_rs`` (rejection without weights, see MIS) is not a flag but a key of --custom-config-path.
    """
    return args.use_tis or vars(args).get("use_rs", False)


def correct_mismatch(
    args: Namespace,
    batch: Batch,
    loss_T: Tensor,
    train_log_prob_N: Sequence[Tensor],
    rollout_log_prob_N: Sequence[Tensor],
    log_prob_N: Sequence[Tensor],
) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
    """Run the correction, and add the metric ``ois``: the unclipped weight ``pi_train / pi_rollout``.

    Returns:
        the per-token loss [T]; the loss masks, [R] per sample and 0 for a rejected token; per-token metrics [T],
        including those of rejected tokens.
    """
    path = args.custom_tis_function_path
    function = vanilla_tis_function if path is None else load_function(path)
    corrected_T, masks, metrics_T = call_plugin(
        PluginCall("--custom-tis-function-path", path or ""),
        function,
        args=args,
        pg_loss=loss_T,
        train_log_probs=list(train_log_prob_N),
        rollout_log_probs=list(rollout_log_prob_N),
        loss_masks=batch["loss_masks"],
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
        **accepted(function, {"cur_log_probs": list(log_prob_N)}),
    )
    weight_T = importance_weight(torch.cat(list(train_log_prob_N)), torch.cat(list(rollout_log_prob_N)))
    return corrected_T, list(masks), {"ois": weight_T, **metrics_T}


def _token_wise(name: str) -> Callable[..., tuple[Tensor, list[Tensor], dict[str, Tensor]]]:
    """Wrap a correction of ``slime.algorithms.off_policy`` in the signature of ``--custom-tis-function-path``."""

    def correct(
        args: Namespace,
        *,
        pg_loss: Tensor,
        train_log_probs: Sequence[Tensor],
        rollout_log_probs: Sequence[Tensor],
        loss_masks: Sequence[Tensor],
        **_: Any,
    ) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
        bounds = MismatchBounds(low=args.tis_clip_low, high=args.tis_clip)
        train_T, rollout_T = torch.cat(list(train_log_probs)), torch.cat(list(rollout_log_probs))
        loss_T, metrics_T = TOKEN_CORRECTIONS[name](pg_loss, train_T, rollout_T, bounds)
        return loss_T, list(loss_masks), metrics_T

    return correct


vanilla_tis_function = _token_wise("tis")
"""Weight each token's loss by its importance weight, clamped to ``--tis-clip-low .. --tis-clip`` (TIS)."""
icepop_function = _token_wise("icepop")
"""Weight each token's loss by its importance weight; drop tokens whose weight is outside ``--tis-clip-low ..
--tis-clip`` (IcePop)."""
