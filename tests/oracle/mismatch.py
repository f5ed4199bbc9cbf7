"""MIS written plainly: each token's weight, which tokens are rejected, and the reported metrics.

Like ``reference``: float64, one sample at a time, nothing imported from slime.  The steps are, in this order: ratios
at their level, veto and rejection, bounding the weights, dividing by their mean.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tests.oracle.reference import Example, f64

FARTHEST = 20.0
"""Log-ratios are clamped to this many nats."""


@dataclass
class Verdict:
    """The result for one sample: a weight and a 0 or 1 for each response token, and metrics by name."""

    weights: list[float]
    keeps: list[int]
    metrics: dict[str, list[float]]


def trained_positions(example: Example) -> list[int]:
    return [position for position, trains in enumerate(example.mask) if trains]


def ratios(example: Example, level: str) -> list[float]:
    """exp of the token's log-ratio, of their sum, or of their mean over the trained tokens."""
    differences = [old - rollout for old, rollout in zip(example.old, example.rollout, strict=True)]
    if level != "token":
        trained = trained_positions(example)
        total = sum(differences[position] for position in trained)
        if level == "geometric":
            total /= max(len(trained), 1)
        differences = [total] * len(differences)
    return [math.exp(min(max(difference, -FARTHEST), FARTHEST)) for difference in differences]


def multiple_importance_sampling(examples: list[Example], settings: dict[str, Any]) -> list[Verdict]:
    """The result for the samples of one micro-batch; ``settings`` has all keys of mis.yaml."""
    upper = settings["tis_upper_bound"]
    lower = 1 / upper if settings["tis_lower_bound"] is None else settings["tis_lower_bound"]
    rs_lower = lower if settings["rs_lower_bound"] is None else settings["rs_lower_bound"]
    rs_upper = upper if settings["rs_upper_bound"] is None else settings["rs_upper_bound"]
    verdicts = []
    for example in examples:
        metrics = divergence(example)
        keeps = list(example.mask)
        if settings["use_rs"]:
            found = ratios(example, settings["rs_level"])
            metrics["rs_mask_fraction_low"] = [float(ratio < rs_lower) for ratio in found]
            metrics["rs_mask_fraction_high"] = [float(ratio > rs_upper) for ratio in found]
            keeps = [k if rs_lower <= ratio <= rs_upper else 0 for k, ratio in zip(keeps, found, strict=True)]
            if settings["rs_veto_threshold"] is not None:
                limit = math.log(settings["rs_veto_threshold"])
                raw = [old - rollout for old, rollout in zip(example.old, example.rollout, strict=True)]
                is_catastrophic = [bool(m) and d < limit for m, d in zip(example.mask, raw, strict=True)]
                metrics["rs_catastrophic_token_fraction"] = [float(one) for one in is_catastrophic]
                metrics["rs_catastrophic_seq_fraction"] = [float(any(is_catastrophic))] * len(keeps)
                if any(is_catastrophic):
                    keeps = [0] * len(keeps)
        weights = [1.0] * len(keeps)
        if settings["use_tis"]:
            weights = ratios(example, settings["tis_level"])
            metrics["tis_weight_before_bound"] = list(weights)
            mode = settings["tis_mode"]
            if mode == "truncate":
                metrics["tis_truncate_fraction"] = [float(weight > upper) for weight in weights]
                weights = [min(weight, upper) for weight in weights]
            else:
                metrics[f"tis_{mode}_fraction_low"] = [float(weight < lower) for weight in weights]
                metrics[f"tis_{mode}_fraction_high"] = [float(weight > upper) for weight in weights]
            if mode == "clip":
                weights = [min(max(weight, lower), upper) for weight in weights]
            if mode == "mask":
                keeps = [k if lower <= weight <= upper else 0 for k, weight in zip(keeps, weights, strict=True)]
        verdicts.append(Verdict(weights, keeps, metrics))
    if settings["use_tis"]:
        if settings["tis_batch_normalize"]:
            factor = mean_weight(verdicts, by_sequence=settings["tis_level"] != "token")
            for verdict in verdicts:
                verdict.weights = [weight / factor for weight in verdict.weights]
                verdict.metrics["batch_norm_factor"] = [factor] * len(verdict.weights)
        for verdict in verdicts:
            used = [weight for weight, keep in zip(verdict.weights, verdict.keeps, strict=True) if keep]
            zeroed = [weight if keep else 0.0 for weight, keep in zip(verdict.weights, verdict.keeps, strict=True)]
            verdict.metrics["is_ratio_mean_final"] = zeroed
            verdict.metrics["is_ratio_min"] = [min(used, default=0.0)] * len(zeroed)
            verdict.metrics["is_ratio_max"] = [max(used, default=0.0)] * len(zeroed)
    return verdicts


def mean_weight(verdicts: list[Verdict], *, by_sequence: bool) -> float:
    """Mean over kept tokens, or over the means of sequences that keep any; 1 if nothing is kept."""
    kept = [
        [weight for weight, keep in zip(verdict.weights, verdict.keeps, strict=True) if keep] for verdict in verdicts
    ]
    numbers = (
        [sum(row) / len(row) for row in kept if row] if by_sequence else [weight for row in kept for weight in row]
    )
    return sum(numbers) / len(numbers) if numbers else 1.0


def divergence(example: Example) -> dict[str, list[float]]:
    """Divergence of trainer and engine; each number on every token."""
    trained = trained_positions(example)
    count = max(len(trained), 1)
    metrics = {}
    for name, log_probs in (("training", example.old), ("rollout", example.rollout)):
        log_ppl = -sum(log_probs[position] for position in trained) / count
        metrics[f"{name}_log_ppl"] = [log_ppl] * example.response_length
        metrics[f"{name}_ppl"] = [math.exp(min(log_ppl, FARTHEST))] * example.response_length
    differences = [
        min(max(old - rollout, -FARTHEST), FARTHEST) for old, rollout in zip(example.old, example.rollout, strict=True)
    ]
    metrics["kl"] = [-difference for difference in differences]
    metrics["k3_kl"] = [math.exp(difference) - 1 - difference for difference in differences]
    return metrics


def as_tensors(verdict: Verdict) -> tuple[Tensor, Tensor]:
    return f64(verdict.weights), f64([float(keep) for keep in verdict.keeps])
