"""Per-token estimators of the KL divergence from a base policy, from samples of the current one.

Shapes: T = response tokens of the micro-batch on this rank, samples concatenated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from slime.algorithms.registry import Registry

LOW_VAR_KL_BOUND = 10.0
"""``low_var_kl`` is k3 cut to plus and minus this many nats."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KLKind:
    """One way to estimate the KL of a token from the difference of two log-probs."""

    estimate: Callable[[Tensor], Tensor]
    """Of ``d = log_prob - base``, in nats."""
    bound: float | None = None
    """The estimate, weighted, is cut to plus and minus this."""


def k1(difference_T: Tensor) -> Tensor:
    """Return ``d``: unbiased, of high variance, negative as often as not.  As a loss its expected gradient is 0."""
    return difference_T


def k2(difference_T: Tensor) -> Tensor:
    """Return ``d^2 / 2``: biased, of low variance; its gradient is the gradient of the KL."""
    return difference_T.square() / 2


def k3(difference_T: Tensor) -> Tensor:
    """Return ``exp(-d) - 1 + d``: unbiased, of low variance, never negative."""
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
    """Return the KL divergence of each token, in nats, with ``d = log_prob - base``:

        k1: d        k2: d^2 / 2        k3, low_var_kl: exp(-d) - 1 + d

    times the importance ratio when there is one; ``low_var_kl`` is then cut to plus and minus 10.

    k1 and k3 are unbiased estimates of KL(policy || base), k3 is never negative; the gradient of k2, not that of the
    others, is the gradient of the KL.

    Args:
        log_prob_T: log-probability under the policy that is trained; carries the gradient.
        base_T: log-probability under the policy to stay close to.
        kind: name in ``KL_KINDS``; ``--kl-loss-type``.
        importance_ratio_T: policy over sampling policy; multiplies the estimate so that it is unbiased although the
            tokens were sampled from an older policy.

    Raises:
        ConfigError: there is no such kind.

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
