"""The one table of train-data columns: how each travels from ``convert`` to the loss.

``convert`` produces these names, ``split`` cuts them by data-parallel rank, the trainer slices those with a span for
context parallelism.  A name is added here and nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from slime.train_data.routed_experts import EXPERT_ID_DTYPE


@dataclass(frozen=True, slots=True)
class Column:
    """How one field of the train data travels from ``convert`` to the loss."""

    name: str
    dtype: torch.dtype | None = None
    """Tensor dtype on the trainer, one tensor per sample; None leaves Python objects as they are."""
    scope: Literal["sample", "batch"] = "sample"
    """"sample": one entry per sample, cut by data-parallel rank. "batch": every rank gets the whole list."""
    span: Literal["sequence", "response"] | None = None
    """Which tokens an entry covers, hence whether context parallelism slices it."""
    required: bool = False
    """Whether a custom converter must deliver it."""


_TABLE = (
    Column("tokens", torch.int64, span="sequence", required=True),
    Column("response_lengths", required=True),
    Column("rewards", required=True),
    Column("raw_reward", scope="batch"),
    Column("truncated"),
    Column("sample_indices"),
    Column("rollout_ids", required=True),
    Column("loss_masks", torch.int32, span="response", required=True),
    Column("rollout_mask_sums", torch.float32),
    Column("rollout_log_probs", torch.float32, span="response"),
    Column("teacher_log_probs", torch.float32, span="response"),
    Column("rollout_top_p_token_ids", torch.int32),
    Column("rollout_top_p_token_offsets", torch.int32),
    Column("rollout_routed_experts", EXPERT_ID_DTYPE, span="sequence"),
    Column("multimodal_train_inputs"),
    Column("metadata"),
    Column("round_number"),
    Column("source_names"),
    Column("prompt"),
)

COLUMNS: dict[str, Column] = {column.name: column for column in _TABLE}
"""Name to column, in the order in which they are shipped."""
