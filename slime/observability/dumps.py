"""Dumps of rollouts and train data for debugging; one ``torch.save`` file per rollout.

``--save-debug-rollout-data`` writes the samples of a rollout, ``--load-debug-rollout-data`` replays them::

    {"rollout_id": int, "samples": [Sample.to_dict(), ...]}     and, of a background evaluation,
                                                                "weight_versions": {data set: version or None}

``--save-debug-train-data`` writes the data trained on, independent of the trainer's parallel layout::

    {"format_version": 2, "rollout_id": int, "rank": int,      the rank that wrote it
     "samples": [{"rollout_position": int, "sample_index": Sample.index, "dp_rank": int, column: value, ...}, ...],
     "dp_shards": [{"dp_rank", "rank", "partition", "sample_indices", "micro_batch_indices", "num_microbatches",
                    "global_batch_sizes"}, ...],
     "raw_reward": [...]}

Samples are sorted by ``rollout_position`` (alias ``position``); ``data_parallel_rank`` is an alias of ``dp_rank``.  In
``dp_shards``, ``rank`` is the process that provided the shard.  Without ``sample_indices`` in the train data, a
sample's index is its position.  Per-token columns are whole tensors ``[response_length]``, joined from the
context-parallel ranks.

A path is a template: ``{rollout_id}`` is replaced by the number (``eval_N`` for an evaluation); without it, each
rollout overwrites the last.  A dump that cannot be written (a full disk) leaves no partial file behind.
"""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from slime.utils.errors import DataError
from slime.utils.files import write_atomically
from slime.utils.safe_pickle import DAMAGE, read_torch_file
from slime.utils.types import Sample

logger = logging.getLogger(__name__)


SAVE_FLAG = "--save-debug-rollout-data"


def dump_rollout(
    args: Namespace, rollout_id: int, samples: Sequence[Sample], *, evaluation: bool = False, **facts: Any
) -> None:
    """Write the dump that the flags ask for, if any, with ``facts`` as further keys.

    Training does not depend on dumps: if one cannot be written, the run logs an error and continues.  With
    ``--debug-rollout-only`` the dump is the purpose of the run, and the error ends it.

    Raises:
        DataError: the dump cannot be written, with ``--debug-rollout-only``.
    """
    if not args.save_debug_rollout_data:
        return
    try:
        save_rollout_dump(args.save_debug_rollout_data, rollout_id, samples, evaluation=evaluation, **facts)
    except DataError as error:
        if args.debug_rollout_only:
            raise
        logger.error("%s The run continues without this dump.", error)


def save_rollout_dump(
    template: str, rollout_id: int, samples: Sequence[Sample], *, evaluation: bool = False, **facts: Any
) -> Path:
    """Write the samples of one rollout, with ``facts`` as further keys; return the path written.

    Raises:
        DataError: the dump cannot be written; an earlier dump at that path is kept.
    """
    name = f"eval_{rollout_id}" if evaluation else rollout_id
    path = Path(template.format(rollout_id=name))
    content = {"rollout_id": rollout_id, "samples": [sample.to_dict() for sample in samples]} | facts
    write_atomically(
        path, lambda file: torch.save(content, file), what=f"The dump of rollout {name}", flag=SAVE_FLAG, to_disk=False
    )
    return path


def load_rollout_dump(
    template: str,
    rollout_id: int,
    *,
    subsample: float | None = None,
    flag: str = "--load-debug-rollout-data",
    is_trusted: bool = False,
) -> list[Sample]:
    """Read the samples of one rollout.

    Args:
        template: path of the dump, possibly with ``{rollout_id}``.
        subsample: fraction to keep, half of it from the front and half from the back; None keeps all.
        flag: the flag that gave the path, for messages.
        is_trusted: read objects of any class (``--trust-debug-data``); such a file can run code.

    Raises:
        DataError: the file is missing or damaged, has no samples, or contains objects that are not plain data.
    """
    path = Path(template.format(rollout_id=rollout_id))
    if not path.exists():
        raise DataError(
            f"{flag}: {path} does not exist. It must be a file written by "
            "--save-debug-rollout-data, with {rollout_id} in the path if there is one file per rollout."
        )
    rows = read_dump(path, is_trusted=is_trusted)
    samples = [Sample.from_dict(row) for row in rows]
    if subsample is not None:
        half = int(len(samples) * subsample) // 2
        samples = samples[:half] + samples[len(samples) - half :]
    if not samples:
        raise DataError(f"{flag}: {path} holds no samples (subsample {subsample})")
    return samples


def read_dump(path: Path, *, is_trusted: bool = False) -> list[dict[str, Any]]:
    """Return a dump's samples as written.

    Raises:
        DataError: the file is damaged, is not a dump, or contains objects that are not plain data.
    """
    if is_trusted:
        try:
            content = torch.load(path, map_location="cpu", weights_only=False)
        except DAMAGE as error:
            raise DataError(f"{path} cannot be read ({type(error).__name__}: {error}); copy it again.") from error
    else:
        content = read_torch_file(
            path,
            remedy="Write the dump again without it; or, if you wrote it yourself, replay it with --trust-debug-data.",
        )
    rows = content.get("samples") if isinstance(content, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise DataError(f"{path} holds no samples; it must be a file written by {SAVE_FLAG}.")
    return rows


FORMAT_VERSION = 2
LAYOUT = ("partition", "micro_batch_indices", "num_microbatches", "global_batch_sizes")


def save_train_dump(template: str, rollout_id: int, rank: int, shards: Sequence[dict[str, Any]]) -> Path:
    """Write the shards of all data-parallel ranks as one file; return the path written.

    Args:
        template: may contain ``{rollout_id}`` and ``{rank}``.
        shards: one dict per data-parallel rank: ``dp_rank``, ``rank``, the keys of ``LAYOUT``, ``raw_reward``, and
            ``samples`` with one dict of columns per entry of ``partition``.

    Raises:
        DataError: the dump cannot be written; an earlier dump at that path is kept.
    """
    samples: list[dict[str, Any]] = []
    dp_shards: list[dict[str, Any]] = []
    for shard in shards:
        names = {"dp_rank": shard["dp_rank"], "data_parallel_rank": shard["dp_rank"]}
        own = [
            {
                **{"position": place, "rollout_position": place, "sample_index": columns.get("sample_indices", place)},
                **names,
                **columns,
            }
            for place, columns in zip(shard["partition"], shard["samples"], strict=True)
        ]
        samples += own
        layout = {name: shard.get(name) for name in ("rank", *LAYOUT)}
        dp_shards.append({**names, **layout, "sample_indices": [sample["sample_index"] for sample in own]})
    content = {
        "format_version": FORMAT_VERSION,
        "rollout_id": rollout_id,
        "rank": rank,
        "samples": sorted(samples, key=lambda sample: sample["position"]),
        "dp_shards": dp_shards,
        "raw_reward": shards[0].get("raw_reward"),
    }
    path = Path(template.format(rollout_id=rollout_id, rank=rank))
    write_atomically(
        path,
        lambda file: torch.save(content, file),
        what=f"The train data of rollout {rollout_id}",
        flag="--save-debug-train-data",
        to_disk=False,
    )
    return path
