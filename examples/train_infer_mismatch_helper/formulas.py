"""MIS: importance weights and rejection per token, per sequence or by geometric mean.

TIS and IcePop treat each token separately; MIS also handles whole sequences, by bounding, dropping or vetoing.
Weights (TIS) and masks (rejection sampling, RS) are configured separately.  Everything is computed over the given
samples, one micro-batch, so with batch normalization the result depends on how samples are packed.

Shapes: N = samples; R = response tokens of a whole sample, not sliced by context parallelism.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from slime.utils.errors import ConfigError

Level = Literal["token", "sequence", "geometric"]
Mode = Literal["truncate", "clip", "mask"]

LOG_RATIO_BOUND = 20.0
"""Log ratios are clamped to plus or minus this many nats before exponentiation; exp(20) is 5e8."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MisConfig:
    """The settings in mis.yaml."""

    use_tis: bool = True
    """Multiply the loss by importance weights."""
    tis_mode: Mode = "truncate"
    """truncate: clamp weights to the upper bound. clip: clamp to both bounds. mask: keep weights, and reject tokens
    outside the bounds."""
    tis_level: Level = "token"
    """Ratio used as weight: per token, product over the sequence, or geometric mean over the sequence."""
    tis_upper_bound: float = 2.0
    tis_lower_bound: float | None = None
    """Defaults to ``1 / tis_upper_bound``."""
    tis_batch_normalize: bool = False
    """Divide the weights by their mean over the micro-batch, so that they change the direction, not the step size."""
    use_rs: bool = False
    """Reject tokens by masking them."""
    rs_level: Level = "token"
    """Ratio compared with the bounds.  At the sequence and geometric levels, whole sequences are rejected."""
    rs_lower_bound: float | None = None
    """Defaults to the lower bound of the weights."""
    rs_upper_bound: float | None = None
    """Defaults to the upper bound of the weights."""
    rs_veto_threshold: float | None = None
    """With ``use_rs``, reject sequences in which any token's ratio is below this; None turns it off."""

    def __post_init__(self) -> None:
        for name, kinds in (("tis_mode", Mode), ("tis_level", Level), ("rs_level", Level)):
            if getattr(self, name) not in get_args(kinds):
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be one of {', '.join(get_args(kinds))}")
        for name in ("tis_upper_bound", "tis_lower_bound", "rs_upper_bound", "rs_lower_bound", "rs_veto_threshold"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, (int, float)) and value > 0):
                raise ConfigError(f"{name} is {value!r}; it must be a number above 0 (in YAML 1.0e-4, with the dot)")
        for kind, (low, high) in (("tis", self.tis_bounds), ("rs", self.rs_bounds)):
            if low > high:
                raise ConfigError(f"{kind}_lower_bound is {low:g} and {kind}_upper_bound {high:g}; they are swapped")

    @property
    def tis_bounds(self) -> tuple[float, float]:
        """Lower and upper bound of the weights."""
        low = 1.0 / self.tis_upper_bound if self.tis_lower_bound is None else self.tis_lower_bound
        return low, self.tis_upper_bound

    @property
    def rs_bounds(self) -> tuple[float, float]:
        """Lower and upper bound of accepted ratios."""
        low, high = self.tis_bounds
        return (
            low if self.rs_lower_bound is None else self.rs_lower_bound,
            high if self.rs_upper_bound is None else self.rs_upper_bound,
        )


class MisResult(NamedTuple):
    """Weights, masks and metrics of some samples; constant."""

    weight_N: list[Tensor] | None
    """[R] each, factors of the loss; None without ``use_tis``."""
    mask_N: list[Tensor]
    """[R] each, the loss masks with rejected tokens set to 0."""
    metrics: dict[str, list[Tensor]]
    """[R] each, one number per token; to be averaged over the original masks."""


def ratio_at(log_ratio_R: Tensor, mask_R: Tensor, level: Level) -> Tensor:
    """Return the importance ratio [R] of each token:

        token      exp(d[t])
        sequence   exp(sum of d over trained tokens)
        geometric  exp(mean of d over trained tokens)

    with ``d = log pi_train - log pi_rollout``, which must be 0 at untrained tokens.  Exponents are clamped to plus or
    minus 20.
    """
    if level != "token":
        exponent = log_ratio_R.sum()
        if level == "geometric":
            exponent = exponent / mask_R.sum().clamp(min=1)
        log_ratio_R = exponent.expand_as(log_ratio_R)
    return log_ratio_R.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


@torch.no_grad()
def mismatch_importance_sampling(
    train_log_prob_N: Sequence[Tensor],
    rollout_log_prob_N: Sequence[Tensor],
    mask_N: Sequence[Tensor],
    config: MisConfig,
) -> MisResult:
    """Compute weights, masks and metrics of some samples: veto and rejection, then weights, then normalization.

    Multiply each token's loss by its weight, and count it where the new mask is 1.  Keep the loss denominators of the
    old masks, so that rejection does not raise the weight of the other tokens.

    Args:
        train_log_prob_N: [R] each, under the sampling policy, computed by the trainer.
        rollout_log_prob_N: [R] each, recorded by the engine.
        mask_N: [R] each, 1 for trained tokens; log-probs of other tokens are ignored.
        config: Levels, bounds and modes.

    Source: Liu, Li, Fu, Wang et al., "When speed kills stability: demystifying RL collapse from the
        training-inference mismatch", 2025 (sequence and geometric ratios, rejection, veto); token weights: Yao et al.,
        "Your efficient RL framework secretly brings you off-policy RL training", 2025.
    """
    new_mask_N: list[Tensor] = []
    weight_N: list[Tensor] = []
    metrics: dict[str, list[Tensor]] = {}
    for train_R, rollout_R, mask_R in zip(train_log_prob_N, rollout_log_prob_N, mask_N, strict=True):
        is_trained_R = mask_R.to(train_R.device) != 0
        dtype = torch.promote_types(train_R.dtype, torch.float32)
        train_R, rollout_R = (torch.where(is_trained_R, x.to(dtype), 0.0) for x in (train_R, rollout_R))
        log_ratio_R = train_R - rollout_R
        found = _divergence(train_R, rollout_R, is_trained_R)
        keep_R = is_trained_R
        if config.use_rs:
            keep_R = keep_R & _accepted(log_ratio_R, is_trained_R, config, found)
        if config.use_tis:
            weight_R, is_inside_R = _bounded(ratio_at(log_ratio_R, is_trained_R, config.tis_level), config, found)
            weight_N.append(weight_R)
            keep_R = keep_R & is_inside_R
        new_mask_N.append(torch.where(keep_R, mask_R.to(keep_R.device), 0))
        for name, values_R in found.items():
            metrics.setdefault(name, []).append(values_R.to(dtype))
    if not config.use_tis:
        return MisResult(None, new_mask_N, metrics)
    if config.tis_batch_normalize:
        factor = mean_weight(weight_N, new_mask_N, by_sequence=config.tis_level != "token")
        weight_N = [weight_R / factor for weight_R in weight_N]
        metrics["batch_norm_factor"] = [factor.expand_as(weight_R) for weight_R in weight_N]
    metrics |= _final_weights(weight_N, new_mask_N)
    return MisResult(weight_N, new_mask_N, metrics)


def mean_weight(weight_N: Sequence[Tensor], mask_N: Sequence[Tensor], *, by_sequence: bool) -> Tensor:
    """Return the mean weight over kept tokens, or the mean of sequence means if ``by_sequence``; 1 if none is kept."""
    sums = [torch.where(mask_R != 0, weight_R, 0.0).sum() for weight_R, mask_R in zip(weight_N, mask_N, strict=True)]
    counts = [(mask_R != 0).sum().float() for mask_R in mask_N]
    if by_sequence:
        sums = [total / count.clamp(min=1) for total, count in zip(sums, counts, strict=True)]
        counts = [(count > 0).float() for count in counts]
    total, count = torch.stack(sums).sum(), torch.stack(counts).sum()
    return torch.where((count > 0) & (total > 0), total / count.clamp(min=1), 1.0)


def _accepted(log_ratio_R: Tensor, is_trained_R: Tensor, config: MisConfig, found: dict[str, Tensor]) -> Tensor:
    low, high = config.rs_bounds
    ratio_R = ratio_at(log_ratio_R, is_trained_R, config.rs_level)
    found["rs_mask_fraction_low"], found["rs_mask_fraction_high"] = ratio_R < low, ratio_R > high
    accepted_R = (ratio_R >= low) & (ratio_R <= high)
    if config.rs_veto_threshold is not None:
        is_catastrophic_R = is_trained_R & (log_ratio_R < math.log(config.rs_veto_threshold))
        is_vetoed = is_catastrophic_R.any()
        found["rs_catastrophic_token_fraction"] = is_catastrophic_R
        found["rs_catastrophic_seq_fraction"] = is_vetoed.expand_as(is_catastrophic_R)
        accepted_R = accepted_R & ~is_vetoed
    return accepted_R


def _bounded(weight_R: Tensor, config: MisConfig, found: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Apply ``tis_mode``: return the bounded weights, and a mask of tokens that are not rejected."""
    low, high = config.tis_bounds
    is_low_R, is_high_R = weight_R < low, weight_R > high
    everywhere_R = torch.ones_like(is_low_R)
    found["tis_weight_before_bound"] = weight_R
    if config.tis_mode == "truncate":
        found["tis_truncate_fraction"] = is_high_R
        return weight_R.clamp(max=high), everywhere_R
    found[f"tis_{config.tis_mode}_fraction_low"], found[f"tis_{config.tis_mode}_fraction_high"] = is_low_R, is_high_R
    if config.tis_mode == "clip":
        return weight_R.clamp(low, high), everywhere_R
    return weight_R, ~(is_low_R | is_high_R)


def _final_weights(weight_N: Sequence[Tensor], mask_N: Sequence[Tensor]) -> dict[str, list[Tensor]]:
    """Return each used weight (0 if rejected), and the minimum and maximum of its sequence."""
    found: dict[str, list[Tensor]] = {"is_ratio_mean_final": [], "is_ratio_min": [], "is_ratio_max": []}
    for weight_R, mask_R in zip(weight_N, mask_N, strict=True):
        kept = weight_R[mask_R != 0]
        least, largest = (kept.min(), kept.max()) if len(kept) else (weight_R.new_zeros(()), weight_R.new_zeros(()))
        found["is_ratio_mean_final"].append(torch.where(mask_R != 0, weight_R, 0.0))
        found["is_ratio_min"].append(least.expand_as(weight_R))
        found["is_ratio_max"].append(largest.expand_as(weight_R))
    return found


def _divergence(train_R: Tensor, rollout_R: Tensor, is_trained_R: Tensor) -> dict[str, Tensor]:
    """Measure the mismatch between engine and trainer.

    ``kl`` and ``k3_kl`` estimate KL(rollout || train) from the tokens sampled by the engine; perplexities are per
    sequence.
    """
    log_ratio_R = (train_R - rollout_R).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    num_trained = is_trained_R.sum().clamp(min=1)
    train_log_ppl, rollout_log_ppl = -train_R.sum() / num_trained, -rollout_R.sum() / num_trained
    of_sequence = {
        "training_log_ppl": train_log_ppl,
        "rollout_log_ppl": rollout_log_ppl,
        "training_ppl": train_log_ppl.clamp(max=LOG_RATIO_BOUND).exp(),
        "rollout_ppl": rollout_log_ppl.clamp(max=LOG_RATIO_BOUND).exp(),
    }
    return {
        **{name: value.expand_as(train_R) for name, value in of_sequence.items()},
        "kl": -log_ratio_R,
        "k3_kl": log_ratio_R.expm1() - log_ratio_R,
    }
