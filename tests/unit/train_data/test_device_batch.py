"""The columns on the device: a dict for hooks, typed attributes for slime's own code."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from slime.train_data.columns import RankBatch
from slime.train_data.device_batch import DeviceBatch

COMPUTED = {"host_tokens", "log_probs", "ref_log_probs", "values", "kl", "advantages", "returns"}


def test_what_a_hook_writes_into_the_dict_is_read_as_an_attribute() -> None:
    data = DeviceBatch(rewards=[1.0], values=[torch.ones(2)])
    data["advantages"] = [torch.zeros(2)]
    data |= {"kl": [torch.ones(2)], "mine": "kept"}
    assert isinstance(data, dict)
    assert data.advantages is data["advantages"] and data.kl is data["kl"]
    assert data.critic_values[0].tolist() == [1.0, 1.0]
    assert list(data) == ["rewards", "values", "advantages", "kl", "mine"]


def test_an_attribute_that_is_set_is_an_entry_of_the_dict() -> None:
    data = DeviceBatch()
    data.returns = [torch.ones(1)]
    data.critic_values = [torch.zeros(1)]
    assert set(data) == {"returns", "values"}
    assert list(data.values()) == [data["returns"], data["values"]]


def test_a_column_that_is_not_there_is_none_or_names_itself() -> None:
    assert DeviceBatch().ref_log_probs is None
    with pytest.raises(KeyError, match="advantages"):
        _ = DeviceBatch().advantages


def test_every_attribute_is_a_column_of_a_rank_or_computed_by_the_trainer() -> None:
    keys = {entry.key for entry in vars(DeviceBatch).values() if hasattr(entry, "key")}
    assert len(keys) > 20
    assert keys - {field.name for field in fields(RankBatch)} == COMPUTED
