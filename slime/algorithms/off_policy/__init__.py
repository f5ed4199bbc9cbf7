"""Corrections for the mismatch between the engine's sampling probabilities and those that the trainer computes.

``token_weights`` has TIS and IcePop, which treat each token separately.  MIS, which also weighs whole sequences, is a
plug-in: ``examples/train_infer_mismatch_helper``.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from slime.algorithms.off_policy.token_weights import MismatchBounds, icepop, truncated_importance_sampling

__all__ = ["TOKEN_CORRECTIONS", "MismatchBounds", "icepop", "truncated_importance_sampling"]

TokenCorrection = Callable[[Tensor, Tensor, Tensor, MismatchBounds], tuple[Tensor, dict[str, Tensor]]]
"""``(loss_T, train_log_prob_T, rollout_log_prob_T, bounds) -> (loss_T, metrics)``."""

TOKEN_CORRECTIONS: dict[str, TokenCorrection] = {"tis": truncated_importance_sampling, "icepop": icepop}
"""Those that look at each token alone."""
