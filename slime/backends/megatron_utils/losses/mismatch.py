"""Corrections of the policy loss for tokens that the engine sampled from other probabilities than the trainer's.

``--use-tis`` calls ``vanilla_tis_function``, or what ``--custom-tis-function-path`` names: ``icepop_function`` of this
file, MIS of examples/train_infer_mismatch_helper, or a user's own.  The formulas are in
``slime.algorithms.off_policy``.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slime.algorithms.off_policy import TOKEN_CORRECTIONS, MismatchBounds
from slime.algorithms.off_policy.weights import importance_weight
from slime.backends.megatron_utils.losses.columns import Batch
from slime.utils.misc import load_function


@dataclass(frozen=True, kw_only=True, slots=True)
class Corrected:
    """What a correction made of the policy loss."""

    loss_T: Tensor
    loss_masks: list[Tensor]
    """[R] each; a rejected token has 0."""
    metrics_T: dict[str, Tensor]
    """Per token; over the tokens that were trained before anything was rejected."""


def wants_mismatch(args: Namespace) -> bool:
    """Whether engine and trainer are compared at all."""
    return args.use_tis or args.get_mismatch_metrics or applies_correction(args)


def applies_correction(args: Namespace) -> bool:
    """Whether the correction changes the loss; with ``--get-mismatch-metrics`` alone it is only looked at.

    ``use_rs`` is no flag but a key of --custom-config-path: rejection without weights (see MIS).
    """
    return args.use_tis or getattr(args, "use_rs", False)


def correct_mismatch(
    args: Namespace,
    batch: Batch,
    loss_T: Tensor,
    train_log_prob_N: Sequence[Tensor],
    rollout_log_prob_N: Sequence[Tensor],
) -> Corrected:
    """Run the correction; adds the metric ``ois``, the plain weight ``pi_train / pi_rollout``."""
    correct = vanilla_tis_function
    if args.custom_tis_function_path is not None:
        correct = load_function(args.custom_tis_function_path)
    corrected_T, masks, metrics_T = correct(
        args=args,
        pg_loss=loss_T,
        train_log_probs=list(train_log_prob_N),
        rollout_log_probs=list(rollout_log_prob_N),
        loss_masks=batch["loss_masks"],
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
    )
    weight_T = importance_weight(torch.cat(list(train_log_prob_N)), torch.cat(list(rollout_log_prob_N)))
    return Corrected(loss_T=corrected_T, loss_masks=list(masks), metrics_T={"ois": weight_T, **metrics_T})


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
    return _token_wise("tis", args, pg_loss, train_log_probs, rollout_log_probs, loss_masks)


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
    return _token_wise("icepop", args, pg_loss, train_log_probs, rollout_log_probs, loss_masks)


def _token_wise(
    name: str,
    args: Namespace,
    pg_loss: Tensor,
    train_log_probs: Sequence[Tensor],
    rollout_log_probs: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
    bounds = MismatchBounds(low=args.tis_clip_low, high=args.tis_clip)
    train_T, rollout_T = torch.cat(list(train_log_probs)), torch.cat(list(rollout_log_probs))
    loss_T, metrics_T = TOKEN_CORRECTIONS[name](pg_loss, train_T, rollout_T, bounds)
    return loss_T, list(loss_masks), metrics_T
