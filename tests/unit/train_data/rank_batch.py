"""A rank's batch, made by hand."""

from __future__ import annotations

from typing import Any

from slime.train_data.columns import RankBatch


def one_rank(**columns: Any) -> RankBatch:
    """All samples in one micro-batch of one step, each its own rollout, with any further ``columns``."""
    num_samples = len(columns["tokens"])
    return RankBatch.from_dict(
        {
            "rewards": [0.0] * num_samples,
            "rollout_ids": list(range(num_samples)),
            "rollout_mask_sums": [sum(mask) for mask in columns["loss_masks"]],
            "partition": list(range(num_samples)),
            "total_lengths": [len(tokens) for tokens in columns["tokens"]],
            "micro_batch_indices": [list(range(num_samples))],
            "num_microbatches": [1],
            "global_batch_sizes": [num_samples],
        }
        | columns
    )
