"""Wrong results and side effects of plug-ins: one clear error each, before anything trains or is lost."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from slime.rollout.base_types import check_samples
from slime.train_data.columns import TrainBatch
from slime.train_data.convert import check_columns, samples_to_train_data
from slime.train_data.schedule import ScheduleConfig, build_dp_schedule
from slime.train_data.split import split_by_rank
from slime.utils.errors import SlimeError
from slime.utils.types import Sample
from tests.unit.utils.test_hostile_input import ODD

FOREIGN = ODD | {
    "nothing": None, "not a number": float("nan"), "bytes": b"ab", "a set": {1, 2}, "a function": len,
    "a giant number": 10**400,
        "a tensor of two": torch.ones(2), "a complex number": 1j, "two fractions": [0.5, 0.5], "two texts": ["a", "b"],
    "two infinities": [float("inf")] * 2, "two that are not numbers": [float("nan")] * 2, "two nothings": [None] * 2,
    "two large numbers": [1e30, 1e30], "two numbers above zero": [3.0, 2.0],
}  # fmt: skip
WHOLE = ("a negative number", "a large number", "a giant number", "true")
REAL = ("a negative number", "a fraction", "a large number", "true")
MAY_BE = {
    "prompt": FOREIGN, "multimodal_inputs": FOREIGN, "multimodal_train_input_id": FOREIGN, "label": FOREIGN,
    "apply_chat_template_kwargs": FOREIGN, "train_metadata": FOREIGN, "reward": REAL,
    "rollout_top_p_token_ids": FOREIGN, "rollout_top_p_token_offsets": FOREIGN,
    "weight_versions": [name for name, value in FOREIGN.items() if isinstance(value, list | torch.Tensor)],
    "group_index": WHOLE, "index": WHOLE, "rollout_id": [*WHOLE, "a text"], "remove_sample": WHOLE,
    "num_untrained_calls": WHOLE,
    "non_generation_time": [*REAL, *WHOLE, "not a number"], "loss_mask": ["a tensor of two"],
}  # fmt: skip
"""Fields that slime does not read or that may hold anything; and valid values of other fields."""
ALWAYS = ("nothing", "an object", "a text", "true", "a large number")


def sample(index: int) -> Sample:
    return Sample(
        **{"group_index": 0, "index": index, "tokens": [1, 2, 3, 4], "response": "ab", "response_length": 2},
        **{"reward": float(index), "rollout_log_probs": [-0.1, -0.2], "status": Sample.Status.COMPLETED},
    )


def to_ranks(samples: list[Sample]) -> None:
    """Pass a rollout's samples to the trainer's ranks."""
    check_samples([samples], "generate returned")
    batch = samples_to_train_data(samples, [each.reward for each in samples], [each.reward for each in samples])
    schedule = build_dp_schedule(
        ScheduleConfig(dp_size=1), [len(each) for each in batch.tokens], global_batch_size=2,
        rollout_indices=batch.rollout_ids,
    )  # fmt: skip
    split_by_rank(batch, schedule)


@pytest.mark.parametrize("name", [field.name for field in fields(Sample)])
def test_a_sample_that_a_plug_in_leaves_with_a_field_of_another_kind_is_named(name):
    to_ranks([sample(0), sample(1)])
    for kind, value in FOREIGN.items():
        if kind in MAY_BE.get(name, ()):
            continue
        odd = sample(0)
        try:
            setattr(odd, name, value)
            to_ranks([odd, sample(1)])
        except SlimeError as error:
            assert "\n" not in str(error) and len(str(error)) < 1500
            continue
        assert kind in ALWAYS, f"{name}: {kind} passes in silence"


@pytest.mark.parametrize(
    "name", ["tokens", "response_lengths", "loss_masks", "rollout_log_probs", "teacher_log_probs"]
)
@pytest.mark.parametrize("is_entry", [True, False], ids=["an entry", "the column"])
def test_a_column_of_a_converter_of_another_kind_is_named(name, is_entry):
    good = {
        "tokens": [[1, 2, 3, 4]] * 2, "response_lengths": [2, 2], "rewards": [1.0, 0.0], "rollout_ids": [0, 1],
        "loss_masks": [[1, 1]] * 2, "rollout_log_probs": [[-1.0, -2.0]] * 2,
    }  # fmt: skip
    schedule = build_dp_schedule(ScheduleConfig(dp_size=1), [4, 4], global_batch_size=2, rollout_indices=[0, 1])
    split_by_rank(TrainBatch.from_dict(good), schedule)
    for kind, value in FOREIGN.items():
        try:
            batch = TrainBatch.from_dict(good | {name: [value, value] if is_entry else value})
            check_columns(batch)
            split_by_rank(batch, schedule)
        except SlimeError as error:
            assert "\n" not in str(error) and len(str(error)) < 1500
        else:
            assert (name, is_entry, kind) == ("loss_masks", True, "a tensor of two") or value is None, kind
