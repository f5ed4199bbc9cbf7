"""Logged metrics of a rollout of four samples, by hand."""

from argparse import Namespace

import numpy as np
import pytest
import torch

from slime.observability.rollout_metrics import (
    completion_tokens,
    compute_eval_record,
    compute_rollout_record,
    correct_sample_metrics,
)
from slime.utils.types import Sample
from tests.flag_values import args_with

ARGS = args_with(n_samples_per_prompt=2, rollout_num_gpus=2, log_passrate=True)


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


def test_token_rates_are_over_the_seconds_of_generation_and_absent_without_one() -> None:
    in_flight = compute_rollout_record(ARGS, 3, SAMPLES, None, rollout_time=0.1, generation_s=4.0)
    assert (in_flight["perf/rollout_time"], in_flight["perf/time_rollout_s"]) == (0.1, 0.1)
    assert in_flight["perf/rollout_tok_per_s"] == 25.0
    assert in_flight["perf/longest_sample_tokens_per_sec"] == 10.0
    replayed = compute_rollout_record(ARGS, 3, SAMPLES, None, rollout_time=0.1, generation_s=0.0)
    assert replayed["perf/rollout_time"] == 0.1
    assert not [name for name in replayed if name.startswith("perf/") and "tok" in name]


def pass_rates_of(samples: list[Sample], answers: int = 2) -> dict[str, float]:
    args = Namespace(**{**vars(ARGS), "n_samples_per_prompt": answers})
    record = compute_rollout_record(args, 0, samples, None, rollout_time=1.0)
    return {name.removeprefix("passrate/"): value for name, value in record.items() if name.startswith("passrate/")}


def test_a_group_that_lost_an_answer_counts_where_it_has_enough() -> None:
    short = [sample(0, 1.0, 1), sample(1, 0.0, 1), sample(1, 1.0, 1)]
    assert pass_rates_of(short) == {"pass@1": 0.75, "pass@2": 1.0}
    assert pass_rates_of(short[:1]) == {"pass@1": 1.0}
    assert pass_rates_of(short, answers=1) == {}


def test_the_kept_vocabulary_is_that_of_trained_tokens() -> None:
    samples = [sample(0, 1.0, 4), sample(0, 0.0, 2), sample(0, 0.0, 1)]
    samples[0].loss_mask = [1, 0, 0, 1]
    samples[0].rollout_top_p_token_offsets = torch.tensor([0, 3, 10, 10, 15], dtype=torch.int32)  # 3, 7, 0, 5
    samples[1].rollout_top_p_token_offsets = [0, 1, 5]  # 1, 4
    samples[2].rollout_top_p_token_offsets, samples[2].remove_sample = [0, 100], True
    for one in samples:
        one.rollout_top_p_token_ids = torch.zeros(int(one.rollout_top_p_token_offsets[-1]), dtype=torch.int32)
    record = compute_rollout_record(ARGS, 0, samples, None, rollout_time=1.0)
    assert record["rollout/top_p_kept_vocab_per_token"] == (3 + 5 + 1 + 4) / 4
    plain = compute_rollout_record(ARGS, 0, [sample(0, 1.0, 4)], None, rollout_time=1.0)
    assert "rollout/top_p_kept_vocab_per_token" not in plain


def test_an_eval_record_has_one_mean_a_data_set() -> None:
    data = {
        "a": {"rewards": [1, 0], "truncated": [False, True], "samples": SAMPLES[:2]},
        "b": {"rewards": [1.0], "truncated": [], "samples": []},
    }
    record = compute_eval_record(ARGS, 9, data)
    assert (record["eval/a"], record["eval/b"], record["eval/step"]) == (0.5, 1.0, 9)
    assert record["eval/a-truncated_ratio"] == pytest.approx(0.5)
    assert record["eval/a/response_len/mean"] == 15.0


def test_rewards_may_be_numbers_of_numpy() -> None:
    samples = [sample(0, np.float32(0.5), 10), sample(0, np.float32(1), 20)]
    assert compute_rollout_record(ARGS, 3, samples, None, rollout_time=4.0)["rollout/raw_reward"] == 0.75
    record = compute_eval_record(ARGS, 9, {"a": {"rewards": [one.reward for one in samples], "samples": samples}})
    assert record["eval/a"] == 0.75


def traced(name: str = "sglang_generate", **facts: float) -> Sample:
    one = sample(0, 1.0, 10)
    span = {"name": name, "span_id": "a", "ts": 0.0}
    one.trace = {"events": [{**span, "type": "span_start"}, {**span, "type": "span_end", "attrs": facts}]}
    return one


def test_what_engines_said_of_their_requests_is_summed_up() -> None:
    samples = [
        traced(e2e_latency=2.0, queue_time=0.5, pd_prefill_bootstrap_s=0.1),
        traced(e2e_latency=4.0, queue_time=0.0, pd_decode_transfer_s=0.2, finish_reason="stop"),
        sample(0, 0.0, 5),
    ]
    record = compute_rollout_record(ARGS, 0, samples, None, rollout_time=4.0)
    assert (record["perf/request/e2e_latency/mean"], record["perf/request/e2e_latency/max"]) == (3.0, 4.0)
    assert record["perf/request/queue_time/median"] == 0.25
    assert record["perf/prefill/bootstrap_s/mean"] == 0.1 and record["perf/decode/transfer_s/mean"] == 0.2
    assert not any(name.startswith("perf/decode/throughput") for name in record)


def test_decoding_counts_where_the_engine_timed_it_from_its_first_tokens() -> None:
    short = traced(completion_tokens=24, decode_throughput=4e7)  # all tokens arrived at once
    samples = [
        traced(completion_tokens=2000, decode_throughput=10.0),
        traced("sglang_generate_stream", completion_tokens=24, decode_throughput=20.0),
        short,
    ]
    record = compute_rollout_record(ARGS, 0, samples, None, rollout_time=4.0)
    assert (record["perf/decode/throughput/min"], record["perf/decode/throughput/max"]) == (10.0, 20.0)
    assert "perf/decode/throughput/max" not in compute_rollout_record(ARGS, 0, [short], None, rollout_time=4.0)


@pytest.mark.parametrize("tokens", [None, "2000", True, float("nan"), float("inf"), [2000]])
def test_a_plug_in_s_span_that_does_not_say_its_tokens_counts_as_untimed(tokens: object) -> None:
    odd = traced(completion_tokens=tokens, decode_throughput=4e7, e2e_latency=2.0)
    record = compute_rollout_record(ARGS, 0, [odd], None, rollout_time=4.0)
    assert record["perf/request/e2e_latency/mean"] == 2.0
    assert not any(name.startswith("perf/decode/throughput") for name in record)
    assert completion_tokens({"completion_tokens": tokens}) == 0


def test_waits_for_tools_are_taken_off_the_longest_sample() -> None:
    samples = [sample(0, 1.0, 10), sample(0, 1.0, 40)]
    samples[0].non_generation_time, samples[1].non_generation_time = 3.0, 2.0
    record = compute_rollout_record(ARGS, 0, samples, None, rollout_time=4.0)
    assert record["perf/non_generation_time/max"] == 3.0
    assert record["perf/longest_sample_non_generation_time"] == 2.0
    assert record["perf/longest_sample_tokens_per_sec"] == 10.0
    assert record["perf/longest_sample_tokens_per_sec_without_non_generation"] == 20.0
    assert record["perf/longest_effective_sample_tokens_per_sec_without_non_generation"] == 20.0
    assert record["perf/tokens_per_gpu_per_sec_without_non_generation"] == 12.5


def test_responses_that_were_not_graded_are_in_no_figure_of_rewards() -> None:
    args = Namespace(**vars(ARGS) | {"n_samples_per_prompt": 4, "log_correct_samples": True})
    args.log_reward_category, args.reward_key, args.eval_datasets = "why", "score", None
    good = [sample(0, {"score": 1.0, "why": "right"}, 8) for _ in range(3)]
    lost = sample(0, {"score": 0.0}, 8, Sample.Status.FAILED)
    lost.remove_sample = True
    record = compute_rollout_record(args, 0, [*good, lost], None, rollout_time=1.0)
    assert record["rollout/raw_reward"] == record["rollout/correct_samples/ratio"] == record["passrate/pass@1"] == 1.0
    assert record["rollout/error_cat/right"] == record["rollout/zero_std/count_1.0"] == 1
    assert "rollout/raw_reward" not in compute_rollout_record(args, 0, [lost], None, rollout_time=1.0)
    samples = [*good, lost, *(sample(1, {"score": 0.0}, 8) for _ in range(4))]
    data = {"a": {"rewards": [one.reward["score"] for one in samples], "samples": samples}}
    args.n_samples_per_eval_prompt = 4
    record = compute_eval_record(args, 0, data)
    assert record["eval/a"] == pytest.approx(3 / 7) and record["eval/a-pass@1"] == 0.5
    assert record["eval/a/stderr"] == pytest.approx(0.5)
    assert "eval/a" not in compute_eval_record(args, 0, {"a": {"rewards": [0.0], "samples": [lost]}})


def test_pass_rates_of_evaluations_use_each_data_sets_number_of_answers() -> None:
    args = Namespace(**vars(ARGS), eval_datasets=[Namespace(name="a", n_samples_per_eval_prompt=2)])
    data = {"a": {"rewards": [1, 0, 0, 0]}, "b": {"rewards": [1, 0]}}
    record = compute_eval_record(args, 0, data)
    assert (record["eval/a-pass@1"], record["eval/a-pass@2"]) == (0.25, 0.5)
    assert not any(name.startswith("eval/b-pass") for name in record)
    twins = [Sample(index=0), Sample(index=0), Sample(index=1), Sample(index=1)]
    assert "eval/a-pass@1" not in compute_eval_record(args, 0, {"a": {"rewards": [1, 0, 0, 0], "samples": twins}})
    for twin, group, rollout in zip(twins, (0, 0, 1, 1), (0, 0, 2, 3), strict=True):
        twin.group_index, twin.rollout_id = group, rollout
    record = compute_eval_record(args, 0, {"a": {"rewards": [1, 1, 1, 0], "samples": twins}})
    assert record["eval/a-pass@1"] == 0.75  # the only rollout of prompt 0, and half of prompt 1's


# Turns and correct samples


def response_of(length: int, trained: int | None = None, **fields) -> Sample:
    mask = None if trained is None else [1] * trained + [0] * (length - trained)
    return Sample(tokens=[0] * (length + 1), response_length=length, loss_mask=mask, **fields)


def test_quartiles_of_correct_lengths():
    samples = [response_of(length) for length in (10, 20, 30, 40, 50, 1000)]
    metrics = correct_sample_metrics(samples, [1, 1.0, True, 1, 1, 0.5])
    prefix = "rollout/correct_samples/"
    assert metrics == {
        f"{prefix}ratio": pytest.approx(5 / 6),
        f"{prefix}response_length/mean": 30.0,
        f"{prefix}response_length/p25": 20.0,
        f"{prefix}response_length/p50": 30.0,
        f"{prefix}response_length/p75": 40.0,
    }
