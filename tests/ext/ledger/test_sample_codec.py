"""Samples are restored from bytes unchanged, and only new parts are written."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from slime.ext.ledger.sample_codec import EntryEncoder, apply_entry, issued_fields, snapshot, to_entry
from slime.rollout import plain_values
from slime.utils.types import Sample


class Round:
    """An encoder, and a reader that starts from the sample as issued."""

    def __init__(self, issued: Sample, *, trusts_lists: bool = True) -> None:
        self.encoder, self.trusts_lists = EntryEncoder(), trusts_lists
        self.issued = issued_fields(issued)
        self.values: Any = Sample.from_dict(issued.to_dict()).to_dict()
        self.sizes: list[int] = []

    def write(self, entry: Any) -> Any:
        described, chunks = self.encoder.encode("key", snapshot(entry), self.issued, trusts_lists=self.trusts_lists)
        blob = b"".join(chunks)
        self.sizes.append(len(blob))
        self.values, used = apply_entry(self.values, described, memoryview(blob))
        assert used == len(blob)
        return to_entry(self.values)


def answered(sample: Sample, tokens: list[int], status: str = "stop") -> Sample:
    meta = {"finish_reason": {"type": status}, "weight_version": "3", "prompt_tokens": 2, "cached_tokens": 1}
    sample.append_response_tokens(
        None, tokens=tokens, log_probs=[-0.5 * k for k in range(len(tokens))], meta_info=meta, text="x" * len(tokens)
    )
    return sample


def fresh() -> Sample:
    return Sample(group_index=3, index=12, prompt="How?", label="so", tokens=[1, 2], metadata={"k": (1, 2)})


@pytest.mark.parametrize("trusts_lists", [True, False])
def test_a_sample_comes_back_with_everything_that_changed(trusts_lists):
    sample = fresh()
    round_ = Round(sample, trusts_lists=trusts_lists)
    answered(sample, [7, 8, 9], "abort")
    assert round_.write(sample).to_dict() == sample.to_dict()
    sample.metadata["start_rollout_id"] = 4
    answered(sample, [10, 11])
    sample.reward = {"score": 1.0, "text": "good"}
    sample.train_metadata = {"weights": np.arange(3)}
    sample.note = "an attribute of a plug-in"
    back = round_.write(sample)
    assert back.train_metadata.pop("weights").tolist() == [0, 1, 2]
    sample.train_metadata.pop("weights")
    assert back.to_dict() == sample.to_dict()
    assert back.metadata["k"] == (1, 2)


@pytest.mark.parametrize("trusts_lists", [True, False])
def test_an_unchanged_sample_costs_nothing_and_a_reward_does_not_cost_the_tokens(trusts_lists):
    sample = answered(fresh(), list(range(1000)), "abort")
    round_ = Round(fresh(), trusts_lists=trusts_lists)
    round_.write(sample)
    round_.write(sample)
    sample.reward = 1.0
    round_.write(sample)
    assert round_.sizes[0] > 9000 and round_.sizes[1] == 0 and 0 < round_.sizes[2] < 100


def test_a_list_that_grows_after_the_snapshot_is_written_as_it_was():
    sample = answered(fresh(), [7, 8])
    taken = snapshot(sample)
    sample.tokens.append(99)
    sample.rollout_log_probs.append(-9.0)  # type: ignore[union-attr]
    sample.weight_versions.append("4")
    described, chunks = EntryEncoder().encode("key", taken, None)
    values, _ = apply_entry(None, described, memoryview(b"".join(chunks)))
    assert values["tokens"] == [1, 2, 7, 8] and values["rollout_log_probs"] == [0.0, -0.5]  # type: ignore[call-overload]
    assert values["weight_versions"] == ["3"]  # type: ignore[call-overload]


def test_a_list_edited_in_place_is_noticed_where_user_code_runs():
    sample = answered(fresh(), [7, 8])
    round_ = Round(fresh(), trusts_lists=False)
    round_.write(sample)
    sample.loss_mask[0] = 0  # type: ignore[index]
    assert round_.write(sample).loss_mask == [0, 1]


def test_applying_a_record_twice_gives_the_same():
    sample = answered(fresh(), [7, 8], "abort")
    encoder = EntryEncoder()
    issued = issued_fields(fresh())
    records = []
    for more in ([9], [10, 11]):
        records.append(encoder.encode("key", snapshot(answered(sample, more, "abort")), issued))
    values = fresh().to_dict()
    for described, chunks in [*records, *records, records[1]]:
        values, _ = apply_entry(values, described, memoryview(b"".join(chunks)))  # type: ignore[assignment]
    assert values == sample.to_dict()


def test_an_object_of_a_class_is_left_out_with_a_line(caplog):
    sample = answered(fresh(), [7])
    plain_values._TOLD.clear()  # each place is reported once
    sample.client = threading.Lock()
    round_ = Round(fresh())
    back = round_.write(sample)
    del sample.client
    assert back.to_dict() == sample.to_dict()
    assert "Sample.client" in caplog.text


@pytest.mark.parametrize(
    "odd", [{"loss_mask": [0.5, 1]}, {"tokens": [2**40]}, {"response": "\ud800"}, {"label": 2**80}]
)
def test_values_that_do_not_fit_their_packing_come_back_too(odd):
    sample = fresh()
    sample.response_length = 2
    sample.__dict__.update(odd)
    assert Round(fresh()).write(sample).to_dict() == sample.to_dict()


def test_fields_that_go_away_are_gone():
    issued = fresh()
    issued.note = "here"
    round_ = Round(issued)
    del issued.note
    assert "note" not in round_.write(issued).to_dict()


def test_a_fan_out_keeps_its_nesting_and_stripped_heads_have_no_bytes():
    first, second, third = (answered(fresh(), [k]) for k in range(3))
    described, chunks = EntryEncoder().encode("key", snapshot([first, [second, third]]), None)
    values, _ = apply_entry(None, described, memoryview(b"".join(chunks)))
    back = to_entry(values)
    assert [back[0].tokens[-1], back[1][0].tokens[-1], back[1][1].tokens[-1]] == [0, 1, 2]
