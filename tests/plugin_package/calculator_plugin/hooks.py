"""Hooks on single samples, on logging and on the way to the trainer."""

from slime.observability import logging_utils
from slime.observability.metric_utils import compute_statistics, dict_add_prefix

CALLS = {"sync": 0, "async": 0}


def strip_end(args, sample, *, rollout_id=None, evaluation=False):
    """--rollout-sample-hook-path, the plain form: changes the sample in place and returns nothing."""
    CALLS["sync"] += 1
    sample.metadata["hook_rollout_id"] = rollout_id
    sample.metadata["hook_evaluation"] = evaluation
    sample.metadata["reward_was_unset"] = sample.reward is None


async def note_length(args, sample):
    """The async form with fewer keywords; returns the sample."""
    CALLS["async"] += 1
    sample.metadata["length_at_hook"] = sample.response_length
    return sample


LOGGED = []


def log_rollout(rollout_id, args, samples, rollout_extra_metrics, rollout_time):
    """Logs its own numbers and lets the default log follow."""
    calls = [sample.metadata.get("calls", 0) for sample in samples]
    metrics = dict_add_prefix(compute_statistics(calls), "calculator/calls_")
    metrics["rollout/step"] = rollout_id
    LOGGED.append((rollout_id, metrics, dict(rollout_extra_metrics or {}), rollout_time))
    logging_utils.log(args, metrics, step_key="rollout/step")
    return False


def log_eval(rollout_id, args, data, extra_metrics):
    """Replaces the default log."""
    for name, entry in data.items():
        LOGGED.append((rollout_id, name, sum(entry["rewards"]) / max(1, len(entry["rewards"]))))
    return True
