"""Per-token estimators of the KL divergence from a base policy, from samples of the current one.

Shapes: T = response tokens of the micro-batch on this rank, samples concatenated.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from slime.utils.errors import ConfigError

KLKind = Literal["k1", "k2", "k3", "low_var_kl"]
LOW_VAR_KL_BOUND = 10.0
"""``low_var_kl`` is k3 cut to plus and minus this many nats."""


def approx_kl(
    log_prob_T: Tensor, base_T: Tensor, kind: KLKind | str, importance_ratio_T: Tensor | None = None
) -> Tensor:
    """The KL divergence of each token, in nats, with ``d = log_prob - base``:

        k1: d        k2: d^2 / 2        k3, low_var_kl: exp(-d) - 1 + d

    k1 and k3 are unbiased estimates of KL(policy || base), k3 is never negative; the gradient of k2, not that of the
    others, is the gradient of the KL.

    Args:
        log_prob_T: log-probability under the policy that is trained; carries the gradient.
        base_T: log-probability under the policy to stay close to.
        kind: which estimator.
        importance_ratio_T: policy over sampling policy; multiplies the estimate so that it is unbiased although the
            tokens were sampled from an older policy.

    Source: J. Schulman, "Approximating KL divergence", joschu.net/blog/kl-approx.html, 2020.
    """
    difference_T = log_prob_T.float() - base_T.float()
    if kind == "k1":
        kl_T = difference_T
    elif kind == "k2":
        kl_T = difference_T.square() / 2
    elif kind in ("k3", "low_var_kl"):
        kl_T = difference_T.neg().expm1() + difference_T
    else:
        raise ConfigError(f"--kl-loss-type is {kind!r}; it must be one of k1, k2, k3, low_var_kl")
    if importance_ratio_T is not None:
        kl_T = importance_ratio_T * kl_T
    if kind == "low_var_kl":
        kl_T = kl_T.clamp(-LOW_VAR_KL_BOUND, LOW_VAR_KL_BOUND)
    return kl_T
