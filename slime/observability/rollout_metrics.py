"""Computes the metrics of a rollout's or an evaluation's samples, and logs them through ``telemetry``."""

from __future__ import annotations

import math
from argparse import Namespace
from collections import Counter
from collections.abc import Mapping, Sequence
from numbers import Real
from statistics import fmean, quantiles, stdev
from typing import Any, TypeGuard

import torch

from slime.flags.observability import MetricsConfig
from slime.observability import telemetry
from slime.observability.metric_utils import (
    compute_pass_rate,
    compute_rollout_step,
    compute_statistics,
    dict_add_prefix,
    has_repetition,
    pass_rates,
)
from slime.observability.trace_utils import finished_spans
from slime.utils.errors import DataError
from slime.utils.misc import call_hook
from slime.utils.types import Sample


def _reward(config: MetricsConfig, sample: Sample) -> float | None:
    if not sample.is_graded:
        return None
    key = config.reward_key
    reward = sample.reward[key] if key and isinstance(sample.reward, Mapping) else sample.reward
    return float(reward) if isinstance(reward, Real) else None


def _zero_std_counts(config: MetricsConfig, samples: Sequence[Sample]) -> dict[str, int]:
    """Return zero_std/count_{reward}: the number of groups in which all samples have this reward (no signal)."""
    groups: dict[Any, list[float]] = {}
    for sample in samples:
        value = _reward(config, sample)
        if value is not None:
            groups.setdefault(sample.group_index, []).append(value)
    counts = Counter(f"zero_std/count_{round(v[0], 1)}" for v in groups.values() if len(v) > 1 and len(set(v)) == 1)
    return dict(counts)


def compute_metrics_from_samples(args: Namespace, samples: Sequence[Sample]) -> dict[str, Any]:
    """Return length, truncation, repetition, speculative-decoding and prefix-cache metrics, without a prefix."""
    if not samples:
        return {}
    config = MetricsConfig.of(args)
    metrics: dict[str, Any] = {}
    lengths = [sample.effective_response_length for sample in samples]
    metrics |= dict_add_prefix(compute_statistics(lengths), "response_len/")
    if config.advantage_estimator != "ppo":
        metrics |= _zero_std_counts(config, samples)
    metrics["truncated_ratio"] = fmean(sample.status == Sample.Status.TRUNCATED for sample in samples)
    metrics["repetition_frac"] = fmean(has_repetition(sample.response or "") for sample in samples)
    metrics |= _engine_figures(config, samples)
    metrics |= _reward_categories(config, samples)
    failed = sum("reward_error" in (sample.metadata or {}) for sample in samples)
    if failed:
        metrics["reward_failed_frac"] = failed / len(samples)
    return metrics | _kept_vocabulary(samples)


def _kept_vocabulary(samples: Sequence[Sample]) -> dict[str, float]:
    spans = [sample for sample in samples if sample.rollout_top_p_token_offsets is not None]
    if not spans:
        return {}
    num_ids = num_tokens = 0
    for sample in spans:
        if sample.remove_sample:
            continue
        widths = torch.as_tensor(sample.rollout_top_p_token_offsets).diff()
        if sample.loss_mask is not None:
            widths = widths[torch.as_tensor(sample.loss_mask).bool()]
        num_ids += int(widths.sum())
        num_tokens += len(widths)
    return {"top_p_kept_vocab_per_token": num_ids / max(num_tokens, 1)}


def _engine_figures(config: MetricsConfig, samples: Sequence[Sample]) -> dict[str, float]:
    metrics: dict[str, float] = {}
    if config.sglang_speculative_algorithm:
        accepted = sum(sample.spec_info.spec_accept_token_num for sample in samples)
        drafted = sum(sample.spec_info.spec_draft_token_num for sample in samples)
        verified = sum(sample.spec_info.spec_verify_ct for sample in samples)
        completed = sum(sample.spec_info.completion_token_num for sample in samples)
        metrics["spec_accept_rate"] = accepted / drafted if drafted else 0.0
        metrics["spec_accept_length"] = completed / verified if verified else 0.0
    cached = sum(sample.prefix_cache_info.cached_tokens for sample in samples)
    prompted = sum(sample.prefix_cache_info.total_prompt_tokens for sample in samples)
    metrics["prefix_cache_hit_rate"] = cached / prompted if prompted else 0.0
    metrics["avg_cached_tokens_per_sample"] = cached / len(samples)
    return metrics


def _reward_categories(config: MetricsConfig, samples: Sequence[Sample]) -> dict[str, float]:
    key = config.log_reward_category
    if not key:
        return {}
    graded = [sample for sample in samples if sample.is_graded]
    counts = Counter(str(s.reward.get(key)) for s in graded if isinstance(s.reward, Mapping))
    return {f"error_cat/{category}": count / len(graded) for category, count in counts.items()}


def compute_perf_metrics_from_samples(
    args: Namespace, samples: Sequence[Sample], rollout_time: float
) -> dict[str, float]:
    """Return seconds and token rates of generation, without a prefix.  ``effective`` counts only unmasked tokens."""
    metrics = {"rollout_time": rollout_time, "time_rollout_s": rollout_time}
    config = MetricsConfig.of(args)
    if not samples or rollout_time <= 0 or not config.has_rewards:
        return metrics
    num_gpus = max(config.rollout_num_gpus or 1, 1)
    lengths = [sample.response_length for sample in samples]
    effective = [sample.effective_response_length for sample in samples]
    metrics["rollout_tok_per_s"] = sum(effective) / rollout_time
    metrics["tokens_per_gpu_per_sec"] = sum(lengths) / rollout_time / num_gpus
    metrics["effective_tokens_per_gpu_per_sec"] = sum(effective) / rollout_time / num_gpus
    metrics["longest_sample_tokens_per_sec"] = max(lengths) / rollout_time
    metrics["longest_effective_sample_tokens_per_sec"] = max(effective) / rollout_time
    waits = [sample.non_generation_time for sample in samples]
    if any(waits):
        metrics |= dict_add_prefix(compute_statistics(waits), "non_generation_time/")
        metrics |= _rates_without_waits(lengths, waits, rollout_time, num_gpus, "")
        metrics |= _rates_without_waits(effective, waits, rollout_time, num_gpus, "effective_")
    return metrics | compute_request_metrics(samples)


def _rates_without_waits(
    lengths: Sequence[int], waits: Sequence[float], rollout_time: float, num_gpus: int, kind: str
) -> dict[str, float]:
    """Return token rates with the longest samples' mean wait for tools (seconds) subtracted from the time."""
    longest = max(lengths)
    wait = fmean(wait for wait, length in zip(waits, lengths, strict=True) if length == longest)
    metrics = {f"longest_{kind}sample_non_generation_time": wait}
    if rollout_time > wait:
        seconds = rollout_time - wait
        metrics[f"longest_{kind}sample_tokens_per_sec_without_non_generation"] = longest / seconds
        metrics[f"{kind}tokens_per_gpu_per_sec_without_non_generation"] = sum(lengths) / seconds / num_gpus
    return metrics


def compute_rollout_record(
    args: Namespace,
    rollout_id: int,
    samples: Sequence[Sample],
    extra_metrics: Mapping[str, Any] | None,
    rollout_time: float,
    generation_s: float | None = None,
) -> dict[str, Any]:
    """Return the record of one rollout, including prefixes and ``rollout/step``.

    Args:
        rollout_time: seconds that the trainer waited for the rollout.
        generation_s: seconds of generation, for the rates; 0 omits the rates, as for answers from a dump.  None means
            ``rollout_time``.
    """
    config = MetricsConfig.of(args)
    numbers = [_reward(config, sample) for sample in samples]
    rewards = [number for number in numbers if number is not None]
    record: dict[str, Any] = dict(extra_metrics or {})
    record |= dict_add_prefix(compute_metrics_from_samples(args, samples), "rollout/")
    seconds = rollout_time if generation_s is None else generation_s
    record |= dict_add_prefix(compute_perf_metrics_from_samples(args, samples, seconds), "perf/")
    record |= {"perf/rollout_time": rollout_time, "perf/time_rollout_s": rollout_time}
    if rewards and config.has_rewards:
        record["rollout/raw_reward"] = fmean(rewards)
    if config.log_passrate:
        record |= dict_add_prefix(_pass_rates(samples, numbers, config.n_samples_per_prompt), "passrate/")
    if config.log_multi_turn:
        record |= multi_turn_metrics(samples)
    graded = [sample for sample in samples if sample.is_graded]
    if config.log_correct_samples and len(rewards) == len(graded) > 0:
        record |= correct_sample_metrics(graded, rewards)
    record["rollout/step"] = compute_rollout_step(args, rollout_id)
    return record


def compute_eval_record(
    args: Namespace,
    rollout_id: int,
    data: Mapping[str, Mapping[str, Any]],
    extra_metrics: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the record of one evaluation; ``eval/{name}`` is a data set's mean reward over graded samples.

    Args:
        data: name -> {"rewards": list, "truncated": list, "samples": list of Sample (optional)}.
    """
    record: dict[str, Any] = dict(extra_metrics or {})
    config = MetricsConfig.of(args)
    answers = {dataset.name: dataset.n_samples_per_eval_prompt for dataset in config.eval_datasets or []}
    for name, results in data.items():
        answered = results.get("samples") or []
        rewards: list[float | None] = [_eval_reward(reward, name) for reward in results["rewards"]]
        if len(answered) == len(rewards):
            rewards = [reward if one.is_graded else None for one, reward in zip(answered, rewards, strict=True)]
        if graded := [reward for reward in rewards if reward is not None]:
            record[f"eval/{name}"] = fmean(graded)
        if results.get("truncated"):
            record[f"eval/{name}-truncated_ratio"] = fmean(results["truncated"])
        if answered:
            details = compute_metrics_from_samples(args, answered)
            record |= dict_add_prefix(details, f"eval/{name}/")
        group_size = answers.get(name, config.n_samples_per_eval_prompt)
        record |= _standard_error(name, rewards, group_size)
        if config.log_passrate:
            if len(answered) == len(rewards):
                record |= dict_add_prefix(_pass_rates(answered, rewards, group_size), f"eval/{name}-")
            elif not answered and len(graded) % group_size == 0:  # a custom evaluation may return only rewards
                record |= dict_add_prefix(compute_pass_rate(graded, group_size), f"eval/{name}-")
    record["eval/step"] = compute_rollout_step(args, rollout_id)
    return record


def _standard_error(name: str, rewards: Sequence[float | None], group_size: int) -> dict[str, float]:
    if len(rewards) % group_size:
        return {}
    groups = [rewards[i : i + group_size] for i in range(0, len(rewards), group_size)]
    graded = [[reward for reward in group if reward is not None] for group in groups]
    means = [fmean(group) for group in graded if group]
    return {f"eval/{name}/stderr": stdev(means) / len(means) ** 0.5} if len(means) > 1 else {}


def _eval_reward(reward: Any, name: str) -> float:
    """Return an evaluation's reward as a float.

    Raises:
        DataError: it is not a number.
    """
    if isinstance(reward, Real):
        return float(reward)
    raise DataError(
        f"A reward of evaluation set {name} is {str(reward)[:200]}; it must be a number. If the grader returns a "
        "dict, choose an entry with --eval-reward-key, or log it with --custom-eval-rollout-log-function-path."
    )


def _pass_rates(samples: Sequence[Sample], rewards: Sequence[float | None], answers: int) -> dict[str, float]:
    """Return pass@k over the rollouts of each prompt; a rollout is correct if all its samples' rewards are 1.

    As for advantages (``slime.train_data.rewards``), a group is all samples that share a ``group_index``, of any size
    and in any order, and the samples of a fan-out count once.  If no sample has a ``group_index``, each ``answers``
    consecutive samples form a group.

    Args:
        rewards: one per sample; None if not a number or not graded, which leaves the sample out.
        answers: responses per prompt.
    """
    has_names = any(sample.group_index is not None for sample in samples)
    if not has_names and (len(samples) % answers or _is_fanned_out(samples)):
        return {}
    groups: dict[int, dict[tuple[str, int], list[bool]]] = {}
    for position, (sample, reward) in enumerate(zip(samples, rewards, strict=True)):
        group = sample.group_index if has_names else position // answers
        if reward is None or group is None:
            continue
        names = (("rollout", sample.rollout_id), ("index", sample.index), ("position", position))
        rollout = next((kind, number) for kind, number in names if number is not None)
        groups.setdefault(group, {}).setdefault(rollout, []).append(reward == 1)
    counts = [(len(rollouts), sum(map(all, rollouts.values()))) for rollouts in groups.values()]
    return pass_rates(counts, answers)


def _is_fanned_out(samples: Sequence[Sample]) -> bool:
    """Return whether an answer became several samples, so that consecutive samples are not one prompt's answers."""
    indices = [sample.index for sample in samples if sample.index is not None]
    return len(set(indices)) < len(indices)


_STREAMED = frozenset({"sglang_generate_stream"})
REQUEST_SPANS = frozenset({"sglang_generate"}) | _STREAMED
_NAMES = {
    "e2e_latency": "request/e2e_latency",
    "queue_time": "request/queue_time",
    "decode_throughput": "decode/throughput",
}
_MIN_TIMED = 1000
"""Minimum tokens of an answer for SGLang's decode throughput to be meaningful, unless it was streamed: SGLang's clock
starts at the 50th token (SGLANG_FORCE_STREAM_INTERVAL), or at the last token of a shorter answer."""
_DISAGGREGATED = {"pd_prefill_": "prefill/", "pd_decode_": "decode/"}
"""Prefix of a fact of prefill/decode disaggregation -> prefix of its metric."""


def compute_request_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Return mean, median, max and min over requests, without a prefix; in seconds, throughput in tokens per second.

    ``request/e2e_latency/*``, ``request/queue_time/*``, ``decode/throughput/*``, and ``prefill/{fact}/*`` and
    ``decode/{fact}/*`` for the ``pd_prefill_*`` and ``pd_decode_*`` values of disaggregated engines.  Values that no
    request has are omitted; so is the throughput of unstreamed answers that are too short to be timed.
    """
    requests = [attrs for _, _, attrs in finished_spans(samples, _STREAMED)]
    for _, _, attrs in finished_spans(samples, REQUEST_SPANS - _STREAMED):
        is_timed = completion_tokens(attrs) >= _MIN_TIMED
        requests.append({fact: value for fact, value in attrs.items() if is_timed or fact != "decode_throughput"})
    values: dict[str, list[float]] = {}
    for attrs in requests:
        for fact, value in attrs.items():
            name = _metric_of(fact)
            if name is not None and _is_number(value):
                values.setdefault(name, []).append(float(value))
    metrics: dict[str, float] = {}
    for name, numbers in values.items():
        metrics |= dict_add_prefix(compute_statistics(numbers), f"{name}/")
    return metrics


def completion_tokens(attrs: Mapping[str, Any]) -> int:
    """Return the tokens of a request's answer; 0 if its span, which a plug-in may have written, does not tell."""
    value = attrs.get("completion_tokens")
    return int(value) if _is_number(value) and math.isfinite(value) else 0


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _metric_of(fact: str) -> str | None:
    for prefix, metric_prefix in _DISAGGREGATED.items():
        if fact.startswith(prefix):
            return metric_prefix + fact.removeprefix(prefix)
    return _NAMES.get(fact)


def multi_turn_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the number of turns, and response tokens with and without text from tools and environments.

    ``multi_turn/raw_response_length/*`` counts all response tokens, ``multi_turn/wo_obs_response_length/*`` those with
    a loss mask of 1; ``multi_turn_metric/round_number_*`` is the ``round_number`` that a generate function wrote into
    ``sample.metadata``.
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
    """Return the share of samples with reward 1, and the mean and quartiles of their lengths.

    Args:
        rewards: each sample's reward before normalization.

    Returns:
        ``rollout/correct_samples/{ratio,response_length/{mean,p25,p50,p75}}``; only the ratio if none is correct.
    """
    lengths = [
        sample.effective_response_length for sample, reward in zip(samples, rewards, strict=True) if reward == 1
    ]
    metrics = {"ratio": len(lengths) / max(len(samples), 1)}
    if lengths:
        low, middle, high = quantiles(lengths, n=4, method="inclusive") if len(lengths) > 1 else lengths * 3
        figures = {"mean": fmean(lengths), "p25": float(low), "p50": float(middle), "p75": float(high)}
        metrics |= dict_add_prefix(figures, "response_length/")
    return dict_add_prefix(metrics, "rollout/correct_samples/")


def log_rollout(
    args: Namespace,
    rollout_id: int,
    samples: Sequence[Sample],
    extra: Mapping[str, Any] | None,
    seconds: float,
    generation_s: float | None = None,
) -> None:
    """Log one rollout, unless the ``--custom-rollout-log-function-path`` hook returns a true value.

    See :func:`compute_rollout_record` for the times.
    """
    path = args.custom_rollout_log_function_path
    if path:
        if call_hook("--custom-rollout-log-function-path", path, rollout_id, args, samples, extra, seconds):
            return
    record = compute_rollout_record(args, rollout_id, samples, extra, seconds, generation_s)
    telemetry.log(record, "rollout/step", args)


def log_eval(
    args: Namespace,
    rollout_id: int,
    data: Mapping[str, Mapping[str, Any]],
    extra: Mapping[str, Any] | None,
    seconds: float,
) -> dict[str, float]:
    """Log one evaluation, unless the ``--custom-eval-rollout-log-function-path`` hook does.  Return the record."""
    path = args.custom_eval_rollout_log_function_path
    is_logged = False
    if path:
        is_logged = bool(call_hook("--custom-eval-rollout-log-function-path", path, rollout_id, args, data, extra))
    try:
        record = compute_eval_record(args, rollout_id, data, extra) | {"perf/time_eval_s": seconds}
    except DataError:
        if not is_logged:
            raise
        return {"perf/time_eval_s": seconds}  # only the hook can read these rewards
    if not is_logged:
        telemetry.log(record, "eval/step", args)
    return record
