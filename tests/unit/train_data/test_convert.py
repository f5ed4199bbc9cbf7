"""Samples to columns, and columns to ranks."""

import pickle

import pytest
import torch
from ray import cloudpickle

from slime.train_data.columns import COLUMNS, TrainBatch
from slime.train_data.convert import check_columns, samples_to_train_data
from slime.train_data.schedule import DPSchedule
from slime.train_data.split import split_by_rank
from slime.utils.errors import DataError
from slime.utils.types import Sample


def sample(index, prompt=2, response=3, **fields):
    return Sample(index=index, tokens=list(range(prompt + response)), response_length=response, **fields)


def convert(samples, **kwargs):
    rewards = [float(position) for position in range(len(samples))]
    return samples_to_train_data(samples, rewards, rewards, **kwargs)


def test_defaults_are_filled_in():
    data = convert([sample(7), sample(8, status=Sample.Status.TRUNCATED, loss_mask=[1, 0, 1])])
    assert data.loss_masks == [[1, 1, 1], [1, 0, 1]]
    assert data.truncated == [0, 1]
    assert data.sample_indices == [7, 8]
    assert data.rollout_ids == [0, 1]
    assert data.rollout_mask_sums == [3, 2]
    assert data.rewards == [0.0, 1.0]
    assert set(data.to_dict()) <= set(COLUMNS)


def test_siblings_of_a_rollout_share_their_mask_sum_and_strangers_get_unused_ids():
    data = convert([sample(0), sample(1, rollout_id=0), sample(2, rollout_id=0, loss_mask=[0, 0, 1]), sample(3)])
    assert data.rollout_ids == [1, 0, 0, 2]
    assert data.rollout_mask_sums == [3, 4, 4, 3]


def test_removed_sample_stays_in_the_batch_with_an_empty_mask():
    data = convert([sample(0, remove_sample=True, loss_mask=[1, 1, 1])])
    assert data.loss_masks == [[0, 0, 0]]
    assert data.rollout_mask_sums == [0]


def test_raw_reward_of_the_metadata_wins():
    assert convert([sample(0, metadata={"raw_reward": 5.0})]).raw_reward == [5.0]


def test_optional_columns_appear_when_any_sample_has_them():
    tagged = sample(1, rollout_log_probs=[-1.0, -2.0, -3.0], train_metadata={"k": 1}, metadata={"round_number": 2})
    tagged.source = "gsm8k"
    data = convert([sample(0, rollout_log_probs=[-1.0] * 3), tagged])
    assert data.rollout_log_probs == [[-1.0] * 3, [-1.0, -2.0, -3.0]]
    assert data.metadata == [None, {"k": 1}]
    assert data.round_number == [None, 2]
    assert data.source_names == ["unknown", "gsm8k"]
    assert data.teacher_log_probs is None and "teacher_log_probs" not in data.to_dict()


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (sample(4, loss_mask=[1, 1]), "sample 4 has 2 entries in loss_mask"),
        (sample(4, rollout_log_probs=[0.0]), "sample 4 has 1 entries in rollout_log_probs"),
        (sample(4, prompt=0), "sample 4 has response_length 3 and 3 tokens"),
    ],
)
def test_sample_that_breaks_its_lengths_is_refused(bad, message):
    with pytest.raises(DataError, match=message):
        convert([bad])


def test_log_probs_on_some_samples_only_are_refused():
    with pytest.raises(DataError, match="sample 1 has no rollout_log_probs"):
        convert([sample(0, rollout_log_probs=[0.0] * 3), sample(1)])


def test_nucleus_is_demanded_when_sampling_was_cut():
    kept = sample(0, rollout_top_p_token_ids=[4, 5, 6, 7], rollout_top_p_token_offsets=[0, 2, 3, 4])
    data = convert([kept], rollout_top_p=0.9)
    assert data.rollout_top_p_token_offsets == [[0, 2, 3, 4]]
    with pytest.raises(DataError, match="--rollout-top-p is 0.9"):
        convert([sample(0)], rollout_top_p=0.9)


def test_a_sample_without_a_response_needs_no_nucleus():
    kept = sample(0, rollout_top_p_token_ids=[4, 5, 6, 7], rollout_top_p_token_offsets=[0, 2, 3, 4])
    data = convert([kept, sample(1, response=0)], rollout_top_p=0.9)
    assert data.rollout_top_p_token_ids == [[4, 5, 6, 7], []]
    assert data.rollout_top_p_token_offsets == [[0, 2, 3, 4], [0]]


def test_no_samples_are_refused():
    with pytest.raises(DataError, match="no samples to train on"):
        convert([])


SCHEDULE = DPSchedule([[2, 0], [1, 3]], [[[0], [1]], [[0, 1], []]], [2], [4])


def test_each_rank_gets_its_samples_in_micro_batch_order():
    data = convert([sample(index, response=index + 1, rollout_log_probs=[-0.5] * (index + 1)) for index in range(4)])
    first, second = split_by_rank(data, SCHEDULE)
    assert first.partition == [2, 0]
    assert first.response_lengths == [3, 1]
    assert first.total_lengths == [5, 3]
    assert first.raw_reward == second.raw_reward == [0.0, 1.0, 2.0, 3.0]
    assert first.local_raw_reward == [2.0, 0.0]
    assert first.rewards == [2.0, 0.0] and second.rewards == [1.0, 3.0]
    assert first.tokens[0].dtype == torch.int64
    assert first.loss_masks[1].tolist() == [1]
    assert first.rollout_log_probs[0].dtype == torch.float32
    assert first.rollout_mask_sums.tolist() == [3.0, 1.0]
    assert second.micro_batch_indices == [[0, 1], []]
    assert second.num_microbatches == [2]


def test_pixels_that_siblings_share_reach_a_rank_once_and_as_bytes():
    images = {"pixel_values": torch.ones(500, 200, dtype=torch.uint8), "image_grid_thw": torch.tensor([[1, 20, 25]])}
    data = convert([sample(index, multimodal_train_inputs=dict(images)) for index in range(4)])
    for rank in split_by_rank(data, SCHEDULE):
        text = cloudpickle.dumps(rank)  # as Ray's object store does
        assert 100_000 < len(text) < 150_000
        first, second = pickle.loads(text).multimodal_train_inputs
        assert first["pixel_values"].data_ptr() == second["pixel_values"].data_ptr()
        assert (
            torch.equal(first["pixel_values"], images["pixel_values"]) and first["pixel_values"].dtype == torch.uint8
        )


def test_columns_of_tensors_travel_as_one_array_each_and_may_be_written_to():
    more = {"teacher_top": [torch.full((response, 2, 2), 0.5) for response in (1, 2, 3, 0)]}
    samples = [
        sample(index, response=response, metadata={"teacher_top": top}, rollout_log_probs=[-0.25] * response)
        for index, (response, top) in enumerate(zip((1, 2, 3, 0), more["teacher_top"], strict=True))
    ]
    samples[3].loss_mask = []
    for rank in split_by_rank(convert(samples), SCHEDULE):
        got = pickle.loads(cloudpickle.dumps(rank))
        assert got.to_dict().keys() == rank.to_dict().keys() and got.micro_batch_indices == rank.micro_batch_indices
        for name in ("tokens", "loss_masks", "rollout_log_probs", "teacher_top"):
            ours, theirs = getattr(rank, name), getattr(got, name)
            assert [(one.dtype, one.shape) for one in ours] == [(one.dtype, one.shape) for one in theirs]
            assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
            theirs[0].add_(1)
    many = convert([sample(index) for index in range(200)])
    everything = DPSchedule([list(range(200))], [[[*range(200)]]], [1], [200])
    (rank,) = split_by_rank(many, everything)
    assert len(cloudpickle.dumps(rank)) < 30_000  # 10,400 bytes of numbers; a tensor alone adds 400 bytes


@pytest.mark.parametrize("mask", [[1, 0, 1], [True, False, True], [1, 300, 1], [0, -1, 1], [1.0, 0.0, 1.0]])
def test_a_loss_mask_of_any_numbers_is_read_as_they_are_or_refused(mask):
    data = convert([sample(index, loss_mask=mask) for index in range(4)])
    if set(mask) <= {0, 1}:
        for rank in split_by_rank(data, SCHEDULE):
            assert rank.loss_masks[0].dtype == torch.int32 and rank.loss_masks[0].tolist() == [int(x) for x in mask]
        return
    with pytest.raises(DataError, match="in its loss mask; it may have 0 and 1 only"):
        split_by_rank(data, SCHEDULE)


def test_column_of_a_custom_converter_is_carried_and_metadata_too():
    data = convert([sample(index, train_metadata={"i": index}) for index in range(4)])
    by_converter = data.to_dict() | {"my_weight": [0.1, 0.2, 0.3, 0.4]}
    first, _ = split_by_rank(TrainBatch.from_dict(by_converter), SCHEDULE)
    assert first.to_dict()["my_weight"] == first.extra["my_weight"] == [0.3, 0.1]
    assert first.metadata == [{"i": 2}, {"i": 0}]


def test_mask_sums_are_added_when_a_converter_leaves_them_out():
    data = convert([sample(index) for index in range(4)])
    data.rollout_mask_sums = None
    assert split_by_rank(data, SCHEDULE)[0].rollout_mask_sums.tolist() == [3.0, 3.0]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("my_scalar", 3, "column 'my_scalar' .* int entries"),
        ("rewards", [1.0], "column 'rewards' .* 1 entries for 4 samples"),
        ("loss_masks", [[1]] * 4, "sample 0 has 1 entries in loss_masks"),
    ],
)
def test_column_that_does_not_fit_the_samples_is_refused(name, value, message):
    data = convert([sample(index) for index in range(4)])
    changed = TrainBatch.from_dict(data.to_dict() | {name: value})
    with pytest.raises(DataError, match=message):
        check_columns(changed)


def test_missing_required_column_is_named():
    data = convert([sample(index) for index in range(4)]).to_dict()
    del data["rollout_ids"]
    with pytest.raises(DataError, match="lacks rollout_ids"):
        TrainBatch.from_dict(data)
