"""Old path and signatures of the loss and advantage maths, which is in ``slime.algorithms``.

For plug-ins written against slime; nothing inside the package imports this.  Sequences are whole responses: with
context parallelism, gather them first.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from slime.algorithms.advantages import AdvantageConfig, AdvantageInputs, get_estimator
from slime.algorithms.discounted import discounted_suffix_sums
from slime.algorithms.gae import generalised_advantages
from slime.algorithms.kl import approx_kl
from slime.algorithms.log_probs import vocab_parallel_log_probs
from slime.algorithms.policy_losses.cispo import cispo_loss
from slime.algorithms.policy_losses.gspo import sequence_log_ratio, spread_over_tokens
from slime.algorithms.policy_losses.opsm import off_policy_sequence_mask
from slime.algorithms.policy_losses.ppo_clip import ClipConfig, clipped_policy_loss

__all__ = [
    "calculate_log_probs_and_entropy",
    "chunked_discounted_returns",
    "chunked_gae",
    "compute_approx_kl",
    "compute_cispo_loss",
    "compute_gspo_kl",
    "compute_opsm_mask",
    "compute_policy_loss",
    "get_advantages_and_returns_batch",
    "get_grpo_returns",
    "get_reinforce_plus_plus_baseline_advantages",
    "get_reinforce_plus_plus_returns",
    "vanilla_gae",
]


def compute_approx_kl(
    log_probs: Tensor, log_probs_base: Tensor, kl_loss_type: str, importance_ratio: Tensor | None = None
) -> Tensor:
    """Return ``approx_kl``: each token's KL divergence from the base policy, in nats."""
    return approx_kl(log_probs, log_probs_base, kl_loss_type, importance_ratio)


def compute_policy_loss(
    ppo_kl: Tensor, advantages: Tensor, eps_clip: float, eps_clip_high: float, eps_clip_c: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return ``clipped_policy_loss`` of ``ppo_kl = old - new``, the negative log ratio."""
    return clipped_policy_loss(-ppo_kl, advantages, ClipConfig(low=eps_clip, high=eps_clip_high, dual=eps_clip_c))


def compute_cispo_loss(
    ppo_kl: Tensor, log_probs: Tensor, advantages: Tensor, eps_clip: float, eps_clip_high: float
) -> tuple[Tensor, Tensor]:
    """Return ``cispo_loss`` of ``ppo_kl = old - new``, the negative log ratio."""
    return cispo_loss(-ppo_kl, log_probs, advantages, ClipConfig(low=eps_clip, high=eps_clip_high))


def compute_gspo_kl(
    full_log_probs: Sequence[Tensor],
    full_old_log_probs: Sequence[Tensor],
    local_log_probs: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
) -> Tensor:
    """Return each sequence's mean of ``old - new``, repeated for each of its local tokens and concatenated."""
    kl = -sequence_log_ratio(full_log_probs, full_old_log_probs, loss_masks)
    return spread_over_tokens(kl, [len(local) for local in local_log_probs])


def compute_opsm_mask(
    args: Namespace,
    full_log_probs: Sequence[Tensor],
    full_old_log_probs: Sequence[Tensor],
    advantages: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
) -> tuple[Tensor, Tensor]:
    """Return ``off_policy_sequence_mask`` with the threshold ``args.opsm_delta``, and a sum over samples.

    The sum adds up the fractions of trained tokens that the mask drops.
    """
    keep = off_policy_sequence_mask(full_log_probs, full_old_log_probs, loss_masks, advantages, delta=args.opsm_delta)
    dropped = torch.split_with_sizes(1 - keep, [len(mask) for mask in loss_masks])
    fractions = [(row * mask).sum() / mask.sum().clamp(min=1) for row, mask in zip(dropped, loss_masks, strict=True)]
    return keep, torch.stack(fractions).sum()


def get_grpo_returns(rewards: Tensor, kl: Sequence[Tensor]) -> list[Tensor]:
    """Return each sample's reward, repeated for each of its tokens."""
    inputs = AdvantageInputs(rewards_N=rewards, kl_N=kl)
    return get_estimator("grpo").compute(inputs, AdvantageConfig())[1]


def get_reinforce_plus_plus_returns(
    rewards: Tensor,
    kl: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
    response_lengths: Sequence[int],
    total_lengths: Sequence[int],
    kl_coef: float,
    gamma: float,
) -> list[Tensor]:
    """Return each trained token's discounted return, over trained tokens only; 0 for other tokens."""
    inputs = AdvantageInputs(rewards_N=rewards, kl_N=kl, mask_N=loss_masks)
    return get_estimator("reinforce_plus_plus").compute(inputs, AdvantageConfig(kl_coef=kl_coef, gamma=gamma))[1]


def get_reinforce_plus_plus_baseline_advantages(
    rewards: Tensor, kl: Sequence[Tensor], loss_masks: Sequence[Tensor], kl_coef: float
) -> list[Tensor]:
    """Return ``reward - kl_coef * kl`` for each token."""
    inputs = AdvantageInputs(rewards_N=rewards, kl_N=kl, mask_N=loss_masks)
    return get_estimator("reinforce_plus_plus_baseline").compute(inputs, AdvantageConfig(kl_coef=kl_coef))[0]


def get_advantages_and_returns_batch(
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    values_list: Sequence[Tensor],
    rewards_list: Sequence[Tensor],
    gamma: float,
    lambd: float,
    chunked: bool = True,
) -> tuple[list[Tensor], list[Tensor]]:
    """Return generalized advantages and returns of a ragged list, in which every token is a time step.

    The caller leaves out tool tokens.  ``chunked`` has no effect.
    """
    return generalised_advantages(rewards_list, values_list, gamma=gamma, lambd=lambd)


def vanilla_gae(rewards: Tensor, values: Tensor, gamma: float, lambd: float) -> tuple[Tensor, Tensor]:
    """Return generalized advantages and returns of a [B, T] batch."""
    advantages, returns = generalised_advantages(rewards.unbind(0), values.unbind(0), gamma=gamma, lambd=lambd)
    return torch.stack(advantages), torch.stack(returns)


def chunked_gae(
    rewards: Tensor, values: Tensor, gamma: float, lambd: float, chunk_size: int = 128
) -> tuple[Tensor, Tensor]:
    """Compute ``vanilla_gae``; the scan needs no chunks, so ``chunk_size`` has no effect."""
    return vanilla_gae(rewards, values, gamma, lambd)


def chunked_discounted_returns(rewards: Tensor, gamma: float, chunk_size: int = 128) -> Tensor:
    """Return discounted suffix sums along the last dimension; ``chunk_size`` has no effect."""
    return discounted_suffix_sums(rewards, gamma)


def calculate_log_probs_and_entropy(
    logits: Tensor,
    tokens: Tensor,
    tp_group: dist.ProcessGroup | None,
    with_entropy: bool = False,
    chunk_size: int = -1,
    log_prob_keep_mask: Tensor | None = None,
    with_entropy_grad: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Return the log-probability of each token, [T, 1], and optionally the entropy of each row of logits, [T].

    Args:
        logits: [T, V / tensor-parallel size].
        tokens: [T].
    """
    log_probs, entropy = vocab_parallel_log_probs(
        logits,
        tokens,
        tp_group=tp_group,
        chunk_size=chunk_size,
        with_entropy=with_entropy,
        entropy_grad=with_entropy_grad,
        keep=log_prob_keep_mask,
    )
    return log_probs.unsqueeze(-1), entropy
