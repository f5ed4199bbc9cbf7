"""What the trainer trained on, on disk: ``--save-debug-train-data`` writes, ``load_train_dump`` reads.

One ``torch.save`` file a rollout, whatever the layout of the trainer was::

    {"format_version": 2, "rollout_id": int, "rank": int,      the rank that wrote it
     "samples": [{"position": int, "dp_rank": int, column: value, ...}, ...],   by position in the rollout
     "dp_shards": [{"dp_rank", "partition", "micro_batch_indices", "num_microbatches", "global_batch_sizes"}, ...],
     "raw_reward": [...]}

Per-token columns are whole: tensors [response length], joined from the context-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from slime.utils.atomic_file import write_atomically
from slime.utils.errors import DataError

FORMAT_VERSION = 2
LAYOUT = ("partition", "micro_batch_indices", "num_microbatches", "global_batch_sizes")


def save_train_dump(template: str, rollout_id: int, rank: int, shards: Sequence[dict[str, Any]]) -> Path:
    """Write the shards of all data-parallel ranks as one file; gives the path written.

    Args:
        template: may have ``{rollout_id}`` and ``{rank}``.
        rank: the one that writes.
        shards: of each data-parallel rank: ``dp_rank``, the keys of ``LAYOUT``, ``raw_reward`` and ``samples``, one
            dict of columns for each entry of ``partition``.

    Raises:
        DataError: it cannot be written; a dump that was there before still is.
    """
    samples = [
        {"position": position, "dp_rank": shard["dp_rank"], **columns}
        for shard in shards
        for position, columns in zip(shard["partition"], shard["samples"], strict=True)
    ]
    content = {
        "format_version": FORMAT_VERSION,
        "rollout_id": rollout_id,
        "rank": rank,
        "samples": sorted(samples, key=lambda sample: sample["position"]),
        "dp_shards": [{name: shard.get(name) for name in ("dp_rank", *LAYOUT)} for shard in shards],
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


def load_train_dump(path: str | Path) -> dict[str, Any]:
    """The content of a file that ``save_train_dump`` wrote.

    Raises:
        DataError: the file is missing or of another format.
    """
    if not Path(path).exists():
        raise DataError(f"{path} does not exist; --save-debug-train-data writes such files.")
    content = torch.load(path, weights_only=False)
    version = content.get("format_version") if isinstance(content, dict) else None
    if version != FORMAT_VERSION:
        raise DataError(f"{path} has format_version {version}; this reader knows {FORMAT_VERSION}.")
    return content
