"""Splits a rollout's ``TrainBatch`` by a schedule into one ``RankBatch`` per data-parallel rank.

``convert`` has already checked lengths and rewards; this module checks values, as tensors.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from slime.train_data.columns import RankBatch, TrainBatch
from slime.train_data.convert import rollout_mask_sums, sample_name
from slime.train_data.schedule import DPSchedule
from slime.utils.errors import DataError
from slime.utils.sglang_meta import MAX_LOG_PROB


def split_by_rank(batch: TrainBatch, schedule: DPSchedule) -> list[RankBatch]:
    """Return the share of each data-parallel rank.

    Raises:
        DataError: a value is unusable for training.
    """
    if batch.rollout_mask_sums is None:
        batch = replace(batch, rollout_mask_sums=rollout_mask_sums(batch.loss_masks, batch.rollout_ids))
    total_lengths = [len(tokens) for tokens in batch.tokens]

    ranks: list[RankBatch] = []
    for partition, micro_batch_indices in zip(schedule.partitions, schedule.micro_batch_indices, strict=True):
        assert all(0 <= position < len(total_lengths) for position in partition), (partition, len(total_lengths))
        names = [sample_name(batch, position) for position in partition]
        columns: dict[str, Any] = {
            name: list(values)
            if column.scope == "batch"
            else _as_column(name, [values[position] for position in partition], column.dtype, names)
            for name, column, values in batch.columns()
        }
        _check_values(columns, names)
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


def _as_column(
    name: str, values: list[Any], dtype: torch.dtype | None, names: Sequence[str]
) -> list[Any] | torch.Tensor:
    """Convert the entries to CPU tensors; a column of plain numbers becomes a single tensor."""
    if dtype is None:
        return values
    if values and all(isinstance(value, int | float) for value in values):
        try:
            return torch.tensor(values, dtype=dtype)
        except (RuntimeError, ValueError, OverflowError) as error:
            raise DataError(f"column {name!r} of the train data has a number that is not {dtype}: {error}") from error
    return [_as_tensor(name, value, dtype, sample) for value, sample in zip(values, names, strict=True)]


_CODES = {torch.int64: "q", torch.int32: "i", torch.float32: "f"}
"""Dtype -> format code of ``struct``."""


def _as_tensor(name: str, value: Any, dtype: torch.dtype, sample: str) -> torch.Tensor:
    """Convert one entry to a tensor.

    Raises:
        DataError: the entry holds something other than numbers, or a value that ``dtype`` cannot represent exactly
            (integer dtypes only).
    """
    if (plain := _plain_numbers(value, dtype)) is not None:
        return plain
    try:
        tensor = torch.from_numpy(np.array(value)) if isinstance(value, list) else torch.as_tensor(value)
        column = tensor.to(dtype)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        reason = str(error).partition("\n")[0]
        raise DataError(f"{sample} has {str(value)[:200]} in {name}; these must be numbers: {reason}") from error
    if not dtype.is_floating_point and not torch.equal(column.to(tensor.dtype), tensor):
        raise DataError(f"{sample} has {str(value)[:200]} in {name}; these must be whole numbers of {dtype}")
    return column


def _plain_numbers(value: Any, dtype: torch.dtype) -> torch.Tensor | None:
    """Convert a flat list of numbers to a tensor, or return None.  ``struct`` takes half of numpy's time."""
    code = _CODES.get(dtype)
    if not isinstance(value, list) or code is None:
        return None
    if not value:
        return torch.empty(0, dtype=dtype)
    if dtype == torch.int32:  # the dtype of loss masks; going through bytes takes a quarter of the time
        with contextlib.suppress(TypeError, ValueError):
            return torch.frombuffer(bytearray(value), dtype=torch.uint8).to(dtype)
    buffer = bytearray(len(value) * dtype.itemsize)
    try:
        struct.pack_into(f"{len(value)}{code}", buffer, 0, *value)
    except (struct.error, TypeError, OverflowError):
        return None
    return torch.frombuffer(buffer, dtype=dtype)


TOKENS_AT_ONCE = 1 << 20
"""Number of response tokens whose values are checked together."""


def _check_values(columns: Mapping[str, Any], names: Sequence[str]) -> None:
    """Check the loss masks and log-probs of a rank's columns, many samples at a time.

    Raises:
        DataError: a loss mask has a value other than 0 and 1, or a trained token has an impossible log-prob.
    """
    masks = columns["loss_masks"]
    checked = {name: columns[name] for name in ("rollout_log_probs", "teacher_log_probs") if name in columns}
    start = tokens = 0
    for stop in range(1, len(masks) + 1):
        tokens += len(masks[stop - 1])
        if tokens < TOKENS_AT_ONCE and stop < len(masks):
            continue
        mask_T = torch.cat(masks[start:stop])
        if not bool(((mask_T == 0) | (mask_T == 1)).all()):
            for mask, sample in zip(masks[start:stop], names[start:stop], strict=True):
                wrong = mask[(mask != 0) & (mask != 1)]
                if len(wrong):
                    raise DataError(f"{sample} has {wrong[0].item()} in its loss mask; it may have 0 and 1 only")
        for name, column in checked.items():
            if bool((_is_log_prob(torch.cat(column[start:stop])) | (mask_T == 0)).all()):
                continue
            for values, mask, sample in zip(column[start:stop], masks[start:stop], names[start:stop], strict=True):
                wrong = values[~_is_log_prob(values) & (mask == 1)]
                if len(wrong):
                    raise DataError(
                        f"{sample} has {wrong[0].item()} in {name}, at a trained token; a log-prob is finite, and at "
                        "most 0"
                    )
        start, tokens = stop, 0


def _is_log_prob(values: torch.Tensor) -> torch.Tensor:
    return values.isfinite() & (values <= MAX_LOG_PROB)
