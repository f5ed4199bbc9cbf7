"""Train data and a schedule to one ``RankData`` for each data-parallel rank.

RankData is a plain dict: the per-sample columns of this rank in micro-batch order, the columns of batch scope whole,
and the schedule of this rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from slime.train_data.columns import COLUMNS, Column
from slime.train_data.convert import rollout_mask_sums
from slime.train_data.schedule import DPSchedule
from slime.utils.errors import DataError


def split_by_rank(train_data: Mapping[str, Any], schedule: DPSchedule) -> list[dict[str, Any]]:
    """What each data-parallel rank trains on.

    Beside the columns a rank gets ``partition`` (positions of its samples in the rollout), ``total_lengths`` (tokens
    of each of its samples), ``local_raw_reward`` (the raw rewards of its samples; ``raw_reward`` stays whole),
    ``micro_batch_indices`` (lists of positions within the partition), ``num_microbatches`` and ``global_batch_sizes``
    (one entry per step, the same on every rank).

    Raises:
        DataError: a required column is missing, a column has not one entry per sample, or an unknown column is not a
            per-sample list.
    """
    num_samples = _check_columns(train_data)
    columns = dict(train_data)
    if "rollout_mask_sums" not in columns:
        columns["rollout_mask_sums"] = rollout_mask_sums(columns["loss_masks"], columns["rollout_ids"])
    total_lengths = [len(tokens) for tokens in columns["tokens"]]

    ranks: list[dict[str, Any]] = []
    for partition, micro_batch_indices in zip(schedule.partitions, schedule.micro_batch_indices, strict=True):
        assert all(0 <= position < num_samples for position in partition), (partition, num_samples)
        rank: dict[str, Any] = {"partition": list(partition)}
        for name, values in columns.items():
            column = COLUMNS.get(name, Column(name))
            if column.scope == "batch":
                rank[name] = list(values)
            else:
                rank[name] = _as_column([values[position] for position in partition], column.dtype)
        rank["total_lengths"] = [total_lengths[position] for position in partition]
        if "raw_reward" in columns:
            rank["local_raw_reward"] = [columns["raw_reward"][position] for position in partition]
        rank["micro_batch_indices"] = micro_batch_indices
        rank["num_microbatches"] = list(schedule.num_microbatches)
        rank["global_batch_sizes"] = list(schedule.global_batch_sizes)
        ranks.append(rank)
    return ranks


def _check_columns(train_data: Mapping[str, Any]) -> int:
    missing = [name for name, column in COLUMNS.items() if column.required and name not in train_data]
    if missing:
        raise DataError(
            f"the train data lacks {', '.join(missing)}; each is one entry per sample; a converter given by "
            "--custom-convert-samples-to-train-data-path must return all required columns of "
            "slime/train_data/columns.py"
        )
    num_samples = len(train_data["tokens"])
    for name, values in train_data.items():
        length = len(values) if isinstance(values, (Sequence, torch.Tensor)) and not isinstance(values, str) else None
        if length != num_samples:
            raise DataError(
                f"column {name!r} of the train data has {length if length is not None else type(values).__name__} "
                f"entries for {num_samples} samples; every column is a list with one entry per sample; check the "
                "converter given by --custom-convert-samples-to-train-data-path"
            )
    for position, (tokens, response, mask) in enumerate(
        zip(train_data["tokens"], train_data["response_lengths"], train_data["loss_masks"], strict=True)
    ):
        if len(mask) != response or response >= len(tokens):
            raise DataError(
                f"sample {position} of the train data has {len(tokens)} tokens, response length {response} and "
                f"{len(mask)} entries in its loss mask; the mask has one entry per response token, and there is at "
                "least one prompt token"
            )
    return num_samples


def _as_column(values: list[Any], dtype: torch.dtype | None) -> list[Any] | torch.Tensor:
    """The entries as CPU tensors; a column of plain numbers becomes one tensor."""
    if dtype is None:
        return values
    if values and isinstance(values[0], (int, float)):
        return torch.tensor(values, dtype=dtype)
    return [torch.as_tensor(value, dtype=dtype) for value in values]
