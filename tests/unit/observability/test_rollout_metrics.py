"""What is logged about a rollout of four samples, by hand."""

from argparse import Namespace

import pytest

from slime.observability.rollout_metrics import compute_eval_record, compute_rollout_record
from slime.utils.types import Sample

ARGS = Namespace(
    reward_key=None,
    eval_reward_key=None,
    advantage_estimator="grpo",
    n_samples_per_prompt=2,
    n_samples_per_eval_prompt=1,
    rollout_num_gpus=2,
    log_passrate=True,
)


def sample(group: int, reward: float, length: int, status: Sample.Status = Sample.Status.COMPLETED) -> Sample:
    return Sample(group_index=group, reward=reward, response="x", response_length=length, status=status)


SAMPLES = [sample(0, 1.0, 10), sample(0, 1.0, 20), sample(1, 0.0, 30, Sample.Status.TRUNCATED), sample(1, 1.0, 40)]


def test_a_rollout_record_holds_reward_lengths_rates_and_pass_rate() -> None:
    record = compute_rollout_record(ARGS, 3, SAMPLES, {"rollout/dynamic_filter/drop_x": 2}, rollout_time=4.0)
    assert record["rollout/step"] == 3
    assert record["rollout/raw_reward"] == 0.75
    assert record["rollout/response_len/mean"] == 25.0
    assert record["rollout/truncated_ratio"] == 0.25
    assert record["rollout/zero_std/count_1.0"] == 1
    assert record["rollout/dynamic_filter/drop_x"] == 2
    assert record["perf/rollout_tok_per_s"] == 25.0
    assert record["perf/tokens_per_gpu_per_sec"] == 12.5
    assert record["passrate/pass@1"] == 0.75
    assert record["passrate/pass@2"] == 1.0


def test_masked_tokens_do_not_count_as_effective() -> None:
    one = sample(0, 1.0, 4)
    one.loss_mask = [1, 0, 0, 1]
    record = compute_rollout_record(ARGS, 0, [one, sample(0, 0.0, 4)], None, rollout_time=1.0)
    assert record["rollout/response_len/min"] == 2.0
    assert record["perf/rollout_tok_per_s"] == 6.0
    assert record["perf/tokens_per_gpu_per_sec"] == 4.0


def test_an_eval_record_has_one_mean_a_data_set() -> None:
    data = {
        "a": {"rewards": [1, 0], "truncated": [False, True], "samples": SAMPLES[:2]},
        "b": {"rewards": [1.0], "truncated": [], "samples": []},
    }
    record = compute_eval_record(ARGS, 9, data)
    assert (record["eval/a"], record["eval/b"], record["eval/step"]) == (0.5, 1.0, 9)
    assert record["eval/a-truncated_ratio"] == pytest.approx(0.5)
    assert record["eval/a/response_len/mean"] == 15.0
