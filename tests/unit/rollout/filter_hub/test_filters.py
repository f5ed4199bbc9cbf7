"""Which groups a filter keeps, and what the rollout loop does with the result."""

from __future__ import annotations

from argparse import Namespace

import pytest

from slime.rollout.filter_hub.base_types import (
    DynamicFilterOutput,
    MetricGatherer,
    call_dynamic_filter,
    should_drop_dynamic_filter_output,
)
from slime.rollout.filter_hub.dynamic_sampling_filters import (
    check_reward_nonzero_std,
    check_reward_nonzero_std_with_fallback,
)
from slime.utils.errors import HookError
from slime.utils.types import Sample

ARGS = Namespace(reward_key=None)


def group(*rewards):
    return [Sample(reward=reward) for reward in rewards]


@pytest.mark.parametrize(
    ("rewards", "keep", "reason"),
    [
        ((1, 0), True, None),
        ((1, 1), False, "zero_std_1.0"),
        ((0.25, 0.25), False, "zero_std_0.2"),
        ((0.5, 0.5 + 1e-7), False, "zero_std_0.5"),
        ((0.5, 0.5 + 1e-5), True, None),
        ((1,), False, "zero_std_1.0"),
        ((-1.0, -1.0), False, "zero_std_-1.0"),
    ],
)
def test_a_group_is_kept_when_its_rewards_differ(rewards, keep, reason):
    output = check_reward_nonzero_std(ARGS, group(*rewards))
    assert (output.keep, output.reason, output.keep_when_insufficient) == (keep, reason, False)


def test_a_fanned_out_group_is_judged_by_all_its_samples():
    assert check_reward_nonzero_std(ARGS, [group(1, 1), group(0)]).keep
    assert not check_reward_nonzero_std(ARGS, [group(1, 1), group(1)]).keep


def test_a_sample_that_was_not_graded_keeps_no_group():
    samples = group(1, 1, 0)
    samples[2].status, samples[2].remove_sample = Sample.Status.FAILED, True
    assert check_reward_nonzero_std(ARGS, samples).reason == "zero_std_1.0"
    assert check_reward_nonzero_std(ARGS, samples[2:]).reason == "not_graded"
    assert check_reward_nonzero_std(ARGS, group(0) + samples).keep


def test_the_fallback_filter_asks_to_keep_when_insufficient():
    assert check_reward_nonzero_std_with_fallback(ARGS, group(1, 1)).keep_when_insufficient


@pytest.mark.parametrize("answer", [None, "yes", [True]])
def test_other_answers_are_refused(answer):
    with pytest.raises(HookError, match="must return a DynamicFilterOutput or a bool"):
        call_dynamic_filter(lambda args, samples: answer, ARGS, group(1))


@pytest.mark.parametrize(
    ("keep", "fallback", "remaining", "drop"),
    [
        (True, False, 9, False),
        (False, False, 4, True),
        (False, True, 5, True),
        (False, True, 4, False),
    ],
)
def test_a_rejected_group_stays_only_when_the_rest_would_not_do(keep, fallback, remaining, drop):
    output = DynamicFilterOutput(keep=keep, keep_when_insufficient=fallback)
    assert should_drop_dynamic_filter_output(output, remaining_batch_size=remaining, target_data_size=4) is drop


def test_drops_are_counted_by_reason():
    gatherer = MetricGatherer()
    for reason in ("a", "a", None):
        gatherer.on_dynamic_filter_drop(reason=reason)
    assert gatherer.collect() == {"rollout/dynamic_filter/drop_a": 2, "rollout/dynamic_filter/drop_unspecified": 1}
