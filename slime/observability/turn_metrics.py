"""``--log-multi-turn`` and ``--log-correct-samples``: how long responses are, beyond the usual figures."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, quantiles

from slime.observability.metric_utils import compute_statistics, dict_add_prefix
from slime.utils.types import Sample

CORRECT_REWARD = 1


def multi_turn_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Tokens of responses with and without what tools and environments said, and turns.

    ``multi_turn/raw_response_length/*`` counts all tokens of a response, ``multi_turn/wo_obs_response_length/*`` those
    with a loss mask of 1, ``multi_turn_metric/round_number_*`` the ``round_number`` that a generate function wrote
    into ``sample.metadata``.
    """
    raw = [sample.response_length for sample in samples]
    drawn = [sample.effective_response_length for sample in samples]
    rounds = [sample.metadata["round_number"] for sample in samples if "round_number" in (sample.metadata or {})]
    return (
        dict_add_prefix(compute_statistics(raw), "multi_turn/raw_response_length/")
        | dict_add_prefix(compute_statistics(drawn), "multi_turn/wo_obs_response_length/")
        | dict_add_prefix(compute_statistics(rounds), "multi_turn_metric/round_number_")
    )


def correct_sample_metrics(samples: Sequence[Sample], rewards: Sequence[float]) -> dict[str, float]:
    """The share of samples with reward 1, and the quartiles of their lengths.

    Args:
        rewards: of each sample, before normalisation.

    Returns:
        ``rollout/correct_samples/{ratio,response_length/{mean,p25,p50,p75}}``; the ratio alone when none is correct.
    """
    lengths = [
        sample.effective_response_length
        for sample, reward in zip(samples, rewards, strict=True)
        if reward == CORRECT_REWARD
    ]
    metrics = {"ratio": len(lengths) / max(len(samples), 1)}
    if lengths:
        low, middle, high = quantiles(lengths, n=4, method="inclusive") if len(lengths) > 1 else lengths * 3
        figures = {"mean": fmean(lengths), "p25": float(low), "p50": float(middle), "p75": float(high)}
        metrics |= dict_add_prefix(figures, "response_length/")
    return dict_add_prefix(metrics, "rollout/correct_samples/")
