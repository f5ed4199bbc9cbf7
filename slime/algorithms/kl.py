"""Per-token estimators of the KL divergence from a base policy, using samples from the current policy.

Shapes: T = response tokens of the micro-batch on this rank, samples concatenated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from slime.algorithms.registry import Registry

LOW_VAR_KL_BOUND = 10.0
"""``low_var_kl`` is k3 clamped to plus or minus this many nats."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KLKind:
    """An estimator of a token's KL from the difference of two log-probs."""

    estimate: Callable[[Tensor], Tensor]
    """Function of ``d = log_prob - base``, in nats."""
    bound: float | None = None
    """Clamp the estimate, after importance weighting, to plus or minus this."""


def k1(difference_T: Tensor) -> Tensor:
    """Return ``d``: unbiased, with high variance, and often negative.  As a loss, its expected gradient is 0."""
    return difference_T


def k2(difference_T: Tensor) -> Tensor:
    """Return ``d^2 / 2``: biased, with low variance.  Its expected gradient is the gradient of the KL."""
    return difference_T.square() / 2


def k3(difference_T: Tensor) -> Tensor:
    """Return ``exp(-d) - 1 + d``: unbiased, with low variance, and never negative."""
    return difference_T.neg().expm1() + difference_T


KL_KINDS: Registry[KLKind] = Registry(
    "--kl-loss-type",
    {
        "k1": KLKind(estimate=k1),
        "k2": KLKind(estimate=k2),
        "k3": KLKind(estimate=k3),
        "low_var_kl": KLKind(estimate=k3, bound=LOW_VAR_KL_BOUND),
    },
)


def approx_kl(log_prob_T: Tensor, base_T: Tensor, kind: str, importance_ratio_T: Tensor | None = None) -> Tensor:
    """Estimate the KL divergence of each token, in nats, with ``d = log_prob - base``:

        k1: d        k2: d^2 / 2        k3, low_var_kl: exp(-d) - 1 + d

    The estimate is multiplied by the importance ratio, if given; ``low_var_kl`` is then clamped to plus or minus 10.

    k1 and k3 are unbiased estimates of KL(policy || base), and k3 is never negative.  Only the expected gradient of k2
    is the gradient of the KL.

    Args:
        log_prob_T: Log-probability under the trained policy; carries the gradient.
        base_T: Log-probability under the base policy.
        kind: Name in ``KL_KINDS``; ``--kl-loss-type``.
        importance_ratio_T: Trained policy over sampling policy; keeps the estimate unbiased for tokens sampled from an
            older policy.

    Raises:
        ConfigError: ``kind`` is unknown.

    Source: J. Schulman, "Approximating KL divergence", joschu.net/blog/kl-approx.html, 2020.
    """
    how = KL_KINDS.resolve(kind)
    dtype = torch.promote_types(log_prob_T.dtype, torch.float32)
    kl_T = how.estimate(log_prob_T.to(dtype) - base_T.to(dtype))
    if importance_ratio_T is not None:
        kl_T = importance_ratio_T * kl_T
    if how.bound is not None:
        kl_T = kl_T.clamp(-how.bound, how.bound)
    return kl_T
