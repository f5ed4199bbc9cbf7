"""A rollout's ``TrainBatch`` and a schedule to one ``RankBatch`` for each data-parallel rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from slime.train_data.columns import RankBatch, TrainBatch
from slime.train_data.convert import rollout_mask_sums
from slime.train_data.schedule import DPSchedule
from slime.utils.errors import DataError


def split_by_rank(batch: TrainBatch, schedule: DPSchedule) -> list[RankBatch]:
    """Return the share of each data-parallel rank.

    Raises:
        DataError: a column has not one entry per sample.
    """
    num_samples = _check_columns(batch)
    if batch.rollout_mask_sums is None:
        batch = replace(batch, rollout_mask_sums=rollout_mask_sums(batch.loss_masks, batch.rollout_ids))
    total_lengths = [len(tokens) for tokens in batch.tokens]

    ranks: list[RankBatch] = []
    for partition, micro_batch_indices in zip(schedule.partitions, schedule.micro_batch_indices, strict=True):
        assert all(0 <= position < num_samples for position in partition), (partition, num_samples)
        columns: dict[str, Any] = {
            name: list(values)
            if column.scope == "batch"
            else _as_column([values[position] for position in partition], column.dtype)
            for name, column, values in batch.columns()
        }
        raw_reward = batch.raw_reward
        columns |= {
            "partition": list(partition),
            "total_lengths": [total_lengths[position] for position in partition],
            "local_raw_reward": None if raw_reward is None else [raw_reward[position] for position in partition],
            "micro_batch_indices": micro_batch_indices,
            "num_microbatches": list(schedule.num_microbatches),
            "global_batch_sizes": list(schedule.global_batch_sizes),
        }
        ranks.append(RankBatch.from_dict(columns))
    return ranks


def _check_columns(batch: TrainBatch) -> int:
    num_samples = len(batch.tokens)
    for name, _, values in batch.columns():
        length = len(values) if isinstance(values, (Sequence, torch.Tensor)) and not isinstance(values, str) else None
        if length != num_samples:
            raise DataError(
                f"column {name!r} of the train data has {length if length is not None else type(values).__name__} "
                f"entries for {num_samples} samples; every column is a list with one entry per sample; check the "
                "converter given by --custom-convert-samples-to-train-data-path"
            )
    for position, (tokens, response, mask) in enumerate(
        zip(batch.tokens, batch.response_lengths, batch.loss_masks, strict=True)
    ):
        if len(mask) != response or response >= len(tokens):
            raise DataError(
                f"sample {position} of the train data has {len(tokens)} tokens, response length {response} and "
                f"{len(mask)} entries in its loss mask; the mask has one entry per response token, and there is at "
                "least one prompt token"
            )
    return num_samples


def _as_column(values: list[Any], dtype: torch.dtype | None) -> list[Any] | torch.Tensor:
    """Return the entries as CPU tensors; a column of plain numbers becomes one tensor."""
    if dtype is None:
        return values
    if values and isinstance(values[0], (int, float)):
        return torch.tensor(values, dtype=dtype)
    return [torch.as_tensor(value, dtype=dtype) for value in values]
