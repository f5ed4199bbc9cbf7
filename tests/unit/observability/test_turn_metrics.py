"""Metrics of turns and of correct samples, by hand values."""

from __future__ import annotations

from argparse import Namespace

import pytest

from slime.observability.rollout_metrics import compute_rollout_record
from slime.observability.turn_metrics import correct_sample_metrics, multi_turn_metrics
from slime.utils.types import Sample


def sample(length: int, trained: int | None = None, **fields) -> Sample:
    mask = None if trained is None else [1] * trained + [0] * (length - trained)
    return Sample(tokens=[0] * (length + 1), response_length=length, loss_mask=mask, **fields)


def test_observations_count_in_the_raw_length_only():
    metrics = multi_turn_metrics([sample(10, 4, metadata={"round_number": 3}), sample(6), sample(2, 0)])
    assert metrics["multi_turn/raw_response_length/mean"] == 6.0
    assert metrics["multi_turn/raw_response_length/max"] == 10.0
    assert metrics["multi_turn/wo_obs_response_length/mean"] == pytest.approx(10 / 3)
    assert metrics["multi_turn/wo_obs_response_length/min"] == 0.0
    assert metrics["multi_turn_metric/round_number_mean"] == 3.0


def test_without_round_numbers_there_is_no_metric_of_them():
    assert not any("round_number" in name for name in multi_turn_metrics([sample(3)]))


def test_quartiles_of_correct_lengths():
    samples = [sample(length) for length in (10, 20, 30, 40, 50, 1000)]
    metrics = correct_sample_metrics(samples, [1, 1.0, True, 1, 1, 0.5])
    prefix = "rollout/correct_samples/"
    assert metrics == {
        f"{prefix}ratio": pytest.approx(5 / 6),
        f"{prefix}response_length/mean": 30.0,
        f"{prefix}response_length/p25": 20.0,
        f"{prefix}response_length/p50": 30.0,
        f"{prefix}response_length/p75": 40.0,
    }


def test_one_correct_sample_is_all_its_quartiles_and_none_has_no_lengths():
    assert set(correct_sample_metrics([sample(7)], [1]).values()) == {1.0, 7.0}
    assert correct_sample_metrics([sample(7)], [0]) == {"rollout/correct_samples/ratio": 0.0}


def test_the_flags_add_them_to_the_record_of_a_rollout():
    args = Namespace(n_samples_per_prompt=2, reward_key=None, log_multi_turn=True, log_correct_samples=True)
    samples = [sample(4, reward=1.0, group_index=0), sample(8, reward=0.0, group_index=0)]
    record = compute_rollout_record(args, 0, samples, None, 1.0)
    assert record["multi_turn/raw_response_length/max"] == 8.0
    assert record["rollout/correct_samples/ratio"] == 0.5
    plain = compute_rollout_record(Namespace(n_samples_per_prompt=2, reward_key=None), 0, samples, None, 1.0)
    assert not any(name.startswith(("multi_turn", "rollout/correct")) for name in plain)
