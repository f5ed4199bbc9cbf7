"""Converts finished samples to the ``TrainBatch`` of their rollout; ``slime.train_data.split`` splits it by rank."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import torch

from slime.train_data.columns import COLUMNS, Ints, TrainBatch
from slime.train_data.routed_experts import RoutedShape, routed_rows, rows_needed
from slime.utils.errors import DataError
from slime.utils.types import Sample

_PER_TOKEN = {
    name: column.read for name, column in COLUMNS.items() if column.span == "response" and column.read is not None
}
"""Readers of the columns with one entry per response token."""


def samples_to_train_data(
    samples: Sequence[Sample],
    raw_rewards: Sequence[float],
    rewards: Sequence[float],
    *,
    rollout_top_p: float = 1.0,
    routed: RoutedShape | None = None,
    extra: Mapping[str, Sequence[Any]] | None = None,
) -> TrainBatch:
    """Return the columns of one rollout's samples.

    This is the only check of what a rollout hands to the trainer.  ``split`` checks the values of tokens, masks and
    log-probs when it converts them to tensors.

    Args:
        samples: Flat list, in scheduling order.
        raw_rewards: Reward of each sample from the grader.
        rewards: Reward of each sample for the advantage estimator.
        rollout_top_p: ``top_p`` of sampling; below 1, every sample with a trained token must have its nucleus ids.
        routed: Set if training replays the engine's expert choices, which the samples must then have.
        extra: Additional columns.

    Raises:
        DataError: there are no samples, or a sample is inconsistent; the message names its index and the field.
    """
    if not samples:
        raise DataError("a rollout gave no samples to train on; check the filters and the rollout function")
    for sample in samples:
        entries = {"loss_mask": sample.loss_mask} | {name: read(sample) for name, read in _PER_TOKEN.items()}
        _check_lengths(f"sample {sample.index}", sample.tokens, sample.response_length, entries)
    loss_masks = [_loss_mask(sample) for sample in samples]
    rollout_ids = _rollout_ids(samples)
    optional: dict[str, Any] = _optional_columns(samples)
    if rollout_top_p != 1.0:
        optional |= _top_p_columns(samples, rollout_top_p)
    if routed is not None:
        optional["rollout_routed_experts"] = [
            routed_rows(
                sample.rollout_routed_experts,
                f"sample {sample.index}",
                routed,
                total_length=len(sample.tokens),
                num_needed=rows_needed(mask, len(sample.tokens)),
            )
            for sample, mask in zip(samples, loss_masks, strict=True)
        ]
    elif any(sample.rollout_routed_experts is not None for sample in samples):
        optional["rollout_routed_experts"] = [
            _present(sample, "rollout_routed_experts", sample.rollout_routed_experts) for sample in samples
        ]
    batch = TrainBatch(
        tokens=[sample.tokens for sample in samples],
        response_lengths=[sample.response_length for sample in samples],
        rewards=list(rewards),
        raw_reward=[
            (sample.metadata or {}).get("raw_reward", raw) for sample, raw in zip(samples, raw_rewards, strict=True)
        ],
        graded=None if all(sample.is_graded for sample in samples) else [sample.is_graded for sample in samples],
        truncated=[int(sample.status == Sample.Status.TRUNCATED) for sample in samples],
        sample_indices=[sample.index for sample in samples],
        rollout_ids=rollout_ids,
        loss_masks=loss_masks,
        rollout_mask_sums=rollout_mask_sums(loss_masks, rollout_ids),
        extra=dict(extra or {}),
        **optional,
    )
    _check_numbers(batch)
    return batch


def check_columns(batch: TrainBatch, named: Mapping[str, tuple[Collection[str], str]] | None = None) -> None:
    """Check the output of a custom converter like ``samples_to_train_data`` checks samples.

    Args:
        named: Column -> (allowed names of its entries, flag that lists them); columns that do not exist are skipped.

    Raises:
        DataError: names the sample and the column.
    """
    num_samples = _count(batch.tokens)
    for name, _, values in batch.columns():
        count = _count(values)
        if num_samples is None or count != num_samples:
            raise DataError(
                f"column {name!r} of the train data has {count if count is not None else type(values).__name__} "
                f"entries for {num_samples} samples; every column is a list with one entry per sample; check the "
                "converter given by --custom-convert-samples-to-train-data-path"
            )
    per_token = {name: values for name, column, values in batch.columns() if column.span == "response"}
    for position, (tokens, response) in enumerate(zip(batch.tokens, batch.response_lengths, strict=True)):
        entries = {name: values[position] for name, values in per_token.items()}
        _check_lengths(sample_name(batch, position), tokens, response, entries)
    _check_numbers(batch)
    for column, (allowed, flag) in (named or {}).items():
        _check_names(batch, column, allowed, flag)


def _check_names(batch: TrainBatch, column: str, allowed: Collection[str], flag: str) -> None:
    for position, name in enumerate(batch.extra.get(column) or ()):
        if not isinstance(name, str) or name not in allowed:
            raise DataError(
                f"{sample_name(batch, position)} has {name!r:.200} in {column}; {flag} has {', '.join(allowed)}; "
                "check the converter given by --custom-convert-samples-to-train-data-path"
            )


def _check_lengths(sample: str, tokens: Any, response: Any, per_token: Mapping[str, Any]) -> None:
    num_tokens = _count(tokens)
    if num_tokens is None or not isinstance(response, Integral) or not 0 <= int(response) < num_tokens:
        raise DataError(
            f"{sample} has response_length {str(response)[:80]} and {_shown(num_tokens, tokens)} tokens; tokens hold "
            "the prompt and the response, and at least one prompt token; check --custom-generate-function-path or "
            "--rollout-function-path"
        )
    for name, values in per_token.items():
        count = _count(values)
        if values is not None and count != response:
            raise DataError(
                f"{sample} has {_shown(count, values)} entries in {name} and response_length {response}; there must "
                "be one for each response token; Sample.append_response_tokens keeps them together"
            )


def _check_numbers(batch: TrainBatch) -> None:
    for position, reward in enumerate(batch.rewards):
        sample = sample_name(batch, position)
        if not isinstance(reward, Real | torch.Tensor) or not is_finite(reward):
            raise DataError(
                f"{sample} has the reward {str(reward)[:200]!r} ({type(reward).__name__}); rewards for training must "
                "be finite numbers"
            )
        total = None if batch.rollout_mask_sums is None else batch.rollout_mask_sums[position]
        is_sum = total is None or (isinstance(total, Real | torch.Tensor) and is_finite(total) and total >= 0)
        if not isinstance(batch.rollout_ids[position], Integral | str) or not is_sum:
            raise DataError(
                f"{sample} has {str(batch.rollout_ids[position])[:80]!r} in rollout_ids and {str(total)[:80]!r} in "
                "rollout_mask_sums; they must be a whole number and a finite number >= 0"
            )


def sample_name(batch: TrainBatch, position: int) -> str:
    """Return a sample's name for errors: its index, or its position if it has no index."""
    index = batch.sample_indices[position] if batch.sample_indices is not None else None
    return f"sample {index}" if index is not None else f"sample {position} of the train data"


def is_finite(value: Any) -> bool:
    """Return True if a number, or a tensor with one element, is finite as a float."""
    try:
        return math.isfinite(value)
    except (ValueError, OverflowError, RuntimeError):  # a tensor with several elements; an integer of 400 digits
        return False


def _count(values: Any) -> int | None:
    """Return the length of a list, array or tensor; None for anything else."""
    is_list = hasattr(values, "__len__") and not isinstance(values, str | bytes | Mapping | set)
    return len(values) if is_list and getattr(values, "ndim", 1) > 0 else None


def _shown(count: int | None, value: Any) -> str:
    return str(count) if count is not None else f"{str(value)[:80]!r} for"


def rollout_mask_sums(loss_masks: Sequence[Ints], rollout_ids: Sequence[int]) -> list[int]:
    """Return for each sample the number of trained tokens of its whole execution, over all samples of a fan-out.

    The loss divides by it, so an execution counts once however many samples it was split into.
    """
    totals: dict[int, int] = defaultdict(int)
    for mask, rollout_id in zip(loss_masks, rollout_ids, strict=True):
        try:
            totals[rollout_id] += int(sum(mask))
        except (TypeError, ValueError, OverflowError) as error:
            raise DataError(f"a loss mask holds {str(mask)[:200]}; it may have 0 and 1 only") from error
    return [totals[rollout_id] for rollout_id in rollout_ids]


def source_name(sample: Sample) -> str:
    """Return a sample's data source: ``sample.source``, else ``metadata["source_name"]``, else "unknown"."""
    own = getattr(sample, "source", None)
    return str(own or (sample.metadata or {}).get("source_name") or "unknown")


def named_entry(sample: Sample, key: str | None, allowed: Collection[str], flag: str) -> str:
    """Return the entry ``key`` of a sample's metadata, or its data source if ``key`` is None.

    Args:
        allowed: Allowed values, listed by ``flag``.

    Raises:
        DataError: the value is not allowed.
    """
    value = source_name(sample) if key is None else (sample.metadata or {}).get(key)
    if not isinstance(value, str) or value not in allowed:
        where = "data source" if key is None else f"metadata[{key!r}]"
        raise DataError(f"sample {sample.index} has the {where} {value!r:.200}; {flag} has {', '.join(allowed)}")
    return value


def _rollout_ids(samples: Sequence[Sample]) -> list[int]:
    """Return each sample's rollout id; a sample without one is a separate execution with the next unused number."""
    used = {sample.rollout_id for sample in samples if sample.rollout_id is not None}
    ids: list[int] = []
    candidate = 0
    for sample in samples:
        if sample.rollout_id is not None:
            ids.append(sample.rollout_id)
            continue
        while candidate in used:
            candidate += 1
        ids.append(candidate)
        candidate += 1
    return ids


def _loss_mask(sample: Sample) -> list[int]:
    if sample.remove_sample:
        return [0] * sample.response_length
    if sample.loss_mask is None:
        return [1] * sample.response_length
    return list(sample.loss_mask)


def _optional_columns(samples: Sequence[Sample]) -> dict[str, list[Any]]:
    """Return the columns read from samples, as far as any sample has an entry."""
    columns: dict[str, list[Any]] = {}
    for name, column in COLUMNS.items():
        entries = [column.read(sample) for sample in samples] if column.read is not None else []
        if any(entry is not None for entry in entries):
            if column.span == "response":
                entries = [
                    _present(sample, name, [0.0] * sample.response_length if is_left_out else entry)
                    for sample, entry in zip(samples, entries, strict=True)
                    for is_left_out in (entry is None and not any(_loss_mask(sample)),)
                ]
            columns[name] = entries
    names = [source_name(sample) for sample in samples]
    if any(name != "unknown" for name in names):
        columns["source_names"] = names
    return columns


def _present(sample: Sample, name: str, entry: Any) -> Any:
    if entry is None:
        raise DataError(
            f"sample {sample.index} has no {name} while other samples of the rollout have; give it to all or to none"
        )
    return entry


def _top_p_columns(samples: Sequence[Sample], rollout_top_p: float) -> dict[str, list[Any]]:
    ids: list[Any] = []
    offsets: list[Any] = []
    for sample in samples:
        token_ids, token_offsets = sample.rollout_top_p_token_ids, sample.rollout_top_p_token_offsets
        if token_offsets is None and not any(_loss_mask(sample)):
            token_ids, token_offsets = [], [0] * (sample.response_length + 1)
        if token_ids is None or token_offsets is None:
            raise DataError(
                f"sample {sample.index} has no rollout_top_p_token_ids and --rollout-top-p is {rollout_top_p}; the "
                "trainer needs the nucleus of each token; set --rollout-top-p 1 or let the engine return it"
            )
        if len(token_offsets) != sample.response_length + 1 or int(token_offsets[-1]) != len(token_ids):
            raise DataError(
                f"sample {sample.index} has {len(token_offsets)} rollout_top_p_token_offsets ending at "
                f"{int(token_offsets[-1]) if len(token_offsets) else None}, {len(token_ids)} ids and response_length "
                f"{sample.response_length}; there must be response_length + 1 offsets, the last equal to the count"
            )
        ids.append(token_ids)
        offsets.append(token_offsets)
    return {"rollout_top_p_token_ids": ids, "rollout_top_p_token_offsets": offsets}
