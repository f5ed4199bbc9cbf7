"""The schedule: golden vectors of eight samples, then its invariants on random rollouts."""

import random
from argparse import Namespace

import pytest

from slime.train_data.model_dims import ModelDims
from slime.train_data.schedule import (
    ScheduleConfig,
    build_dp_schedule,
    capacity_utilisation,
    packing_efficiency,
)
from slime.utils.errors import ConfigError, DataError

LENGTHS = [900, 100, 500, 450, 50, 1200, 300, 700]
TOY = ModelDims(
    num_layers=2,
    hidden_size=64,
    num_attention_heads=4,
    num_query_groups=2,
    head_dim=16,
    ffn_hidden_size=128,
    vocab_size=1000,
)


def config(**changes):
    settings = {"dp_size": 2, "use_dynamic_batch_size": True, "max_tokens_per_gpu": 1000, "flops": TOY}
    return ScheduleConfig(**{**settings, **changes})


@pytest.mark.parametrize(
    ("changes", "global_batch_size", "ids", "partitions", "micro_batches", "num_microbatches"),
    [
        ({}, 8, range(8), [[0, 1, 5], [2, 3, 4, 6, 7]], [[[0, 1], [2]], [[0, 1, 2], [3, 4]]], [2]),
        ({}, 4, range(8), [[0, 1, 6, 7], [2, 3, 5, 4]], [[[0, 1], [2], [3]], [[0, 1], [2], [3]]], [1, 2]),
        (
            {"balance_data": True},
            8,
            range(8),
            [[2, 3, 4, 5], [0, 1, 6, 7]],
            [[[0, 1, 2], [3]], [[0, 1], [2, 3]]],
            [2],
        ),
        (
            {"balance_data": True, "balance_by_flops": True},
            8,
            range(8),
            [[5, 1, 2, 4, 6], [0, 7, 3]],
            [[[0], [1, 2, 3], [4]], [[0], [1], [2]]],
            [3],
        ),
        (
            {},
            2,
            [0, 0, 0, 1, 1, 2, 2, 3],
            [[0, 1, 5], [2, 3, 4, 6, 7]],
            [[[0, 1], [2]], [[0, 1, 2], [3, 4]]],
            [1, 1],
        ),
        (
            {"use_dynamic_batch_size": False, "micro_batch_size": 2},
            8,
            range(8),
            [[0, 1, 4, 5], [2, 3, 6, 7]],
            [[[0, 1], [2, 3]], [[0, 1], [2, 3]]],
            [2],
        ),
    ],
)
def test_schedule_matches_golden_vectors(changes, global_batch_size, ids, partitions, micro_batches, num_microbatches):
    schedule = build_dp_schedule(
        config(**changes), LENGTHS, global_batch_size=global_batch_size, rollout_indices=list(ids)
    )
    assert schedule.partitions == partitions
    assert schedule.micro_batch_indices == micro_batches
    assert schedule.num_microbatches == num_microbatches
    assert schedule.global_batch_sizes == [global_batch_size] * len(num_microbatches)


@pytest.mark.parametrize("seed", range(25))
def test_every_sample_of_full_steps_is_trained_once_and_ranks_stay_in_step(seed):
    rng = random.Random(seed)
    dp_size, vpp_size, group = rng.choice([1, 2, 4]), rng.choice([1, 2]), rng.choice([1, 2, 3])
    sizes = [rng.choice([1, 1, 1, 2, 5]) for _ in range(60)]
    ids = [rollout for rollout, size in enumerate(sizes) for _ in range(size)]
    rng.shuffle(ids)
    lengths = [rng.randint(2, 900) for _ in ids]
    settings = config(
        dp_size=dp_size,
        vpp_size=vpp_size,
        microbatch_group_size_per_vp_stage=group,
        balance_data=rng.random() < 0.5,
        balance_by_flops=rng.random() < 0.3,
    )
    schedule = build_dp_schedule(settings, lengths, global_batch_size=25, rollout_indices=ids)

    first_seen = list(dict.fromkeys(ids))
    trained = {position for position, rollout in enumerate(ids) if rollout in first_seen[:50]}
    flat = [position for partition in schedule.partitions for position in partition]
    assert sorted(flat) == sorted(trained)
    for partition, micro_batches in zip(schedule.partitions, schedule.micro_batch_indices, strict=True):
        assert [index for indices in micro_batches for index in indices] == list(range(len(partition)))
        assert len(micro_batches) == sum(schedule.num_microbatches)
        if not settings.balance_by_flops:
            assert all(sum(lengths[partition[index]] for index in indices) <= 1000 for indices in micro_batches)
    if vpp_size > 1:
        assert all(count % group == 0 for count in schedule.num_microbatches)


def test_step_order_is_kept_within_each_rank():
    schedule = build_dp_schedule(config(), LENGTHS, global_batch_size=4, rollout_indices=list(range(8)))
    for partition, micro_batches in zip(schedule.partitions, schedule.micro_batch_indices, strict=True):
        first_step = [partition[index] for indices in micro_batches[:1] for index in indices]
        assert all(position < 4 for position in first_step)


def test_fixed_micro_batches_that_do_not_divide_are_refused():
    with pytest.raises(ConfigError, match="--micro-batch-size 3"):
        build_dp_schedule(
            config(use_dynamic_batch_size=False, micro_batch_size=3),
            LENGTHS,
            global_batch_size=8,
            rollout_indices=list(range(8)),
        )


@pytest.mark.parametrize(
    ("global_batch_size", "dp_size", "message"),
    [(9, 2, "--global-batch-size is 9"), (1, 2, "1 samples for 2 data-parallel ranks")],
)
def test_rollouts_too_small_for_a_step_are_refused(global_batch_size, dp_size, message):
    with pytest.raises(DataError, match=message):
        build_dp_schedule(
            config(dp_size=dp_size), LENGTHS, global_batch_size=global_batch_size, rollout_indices=list(range(8))
        )


def test_dynamic_packing_without_a_token_limit_is_refused():
    with pytest.raises(ConfigError, match="--max-tokens-per-gpu is None"):
        config(max_tokens_per_gpu=None)


def test_reference_distribution_fills_its_micro_batches():
    rng = random.Random(0)
    lengths = [min(32768, int(rng.lognormvariate(7.5, 1.0)) + 10) for _ in range(8192)]
    settings = ScheduleConfig(dp_size=16, cp_size=2, use_dynamic_batch_size=True, max_tokens_per_gpu=16384)
    schedule = build_dp_schedule(settings, lengths, global_batch_size=8192, rollout_indices=range(8192))
    assert capacity_utilisation(schedule, lengths, capacity_tokens=settings.capacity_tokens) > 0.97
    assert packing_efficiency(schedule, lengths, cp_size=2, pad_multiple=128) > 0.995


def test_a_sample_above_the_budget_stands_alone_and_whole():
    schedule = build_dp_schedule(
        config(dp_size=1, max_tokens_per_gpu=400), LENGTHS, global_batch_size=8, rollout_indices=list(range(8))
    )
    (partition,), (micro_batches,) = schedule.partitions, schedule.micro_batch_indices
    alone = [partition[indices[0]] for indices in micro_batches if len(indices) == 1]
    assert {position for position, length in enumerate(LENGTHS) if length > 400} <= set(alone)
    assert sorted(partition) == list(range(8))


def test_old_path_takes_args_and_answers_with_assertion_errors():
    from slime.utils.dp_schedule import build_dp_schedule as old_build

    args = Namespace(use_dynamic_batch_size=True, max_tokens_per_gpu=1000, balance_data=False, balance_by_flops=False)
    parallel = {"dp_size": 2, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
    partitions, _, num_microbatches, _ = old_build(
        args, parallel, LENGTHS, global_batch_size=8, rollout_indices=list(range(8))
    )
    assert partitions == [[0, 1, 5], [2, 3, 4, 6, 7]]
    assert num_microbatches == [2]
    with pytest.raises(AssertionError, match="--global-batch-size"):
        old_build(args, parallel, LENGTHS, global_batch_size=9, rollout_indices=list(range(8)))
