"""The typed batch that the rollout hands to the trainer: one table of columns.

Every field of ``TrainBatch`` is a column.  Its ``Column`` describes how entries get from the samples to the loss:
``convert`` fills the column, ``split`` cuts it by data-parallel rank, and the trainer converts it to tensors and
slices those with a span for context parallelism.  To add a column, add it here and nowhere else.

Hooks take and return plain dicts: ``to_dict`` and ``from_dict``.

Shapes: N = samples; L = tokens of a sample; R = tokens of its response.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from slime.train_data.routed_experts import EXPERT_ID_DTYPE
from slime.utils.errors import DataError
from slime.utils.types import Sample

Ints = Sequence[int] | Tensor
Floats = Sequence[float] | Tensor
Batch = TypeVar("Batch", bound="TrainBatch")


@dataclass(frozen=True, slots=True)
class Column:
    """How one column gets from the samples to the loss."""

    dtype: torch.dtype | None = None
    """Dtype of the trainer's tensors, one per sample; None leaves Python objects unchanged."""
    scope: Literal["sample", "batch"] = "sample"
    """"sample": one entry per sample, cut by data-parallel rank.  "batch": every rank gets the whole list."""
    span: Literal["sequence", "response"] | None = None
    """Tokens that an entry covers, which determines how context parallelism slices it."""
    read: Callable[[Sample], Any] | None = None
    """Returns a sample's entry, or None.  The column exists if any sample has an entry; with span "response", every
    sample with a trained token must then have one, of length R.  If ``read`` is None, ``convert`` computes the column.
    """


def _column(dtype: torch.dtype | None = None, *, required: bool = False, **how: Any) -> Any:
    """Declare a column; custom converters must return required ones."""
    metadata = {"column": Column(dtype, **how)}
    return field(metadata=metadata) if required else field(default=None, metadata=metadata)


@dataclass(kw_only=True, slots=True)
class TrainBatch:
    """The train data of one rollout; each column has one entry per sample."""

    tokens: Sequence[Ints] = _column(torch.int64, span="sequence", required=True)
    """[L] token ids of prompt and response."""
    response_lengths: Sequence[int] = _column(required=True)
    """R."""
    rewards: Sequence[float] = _column(required=True)
    """Input of the advantage estimator, relative to the group if the estimator requires it."""
    raw_reward: Sequence[Any] | None = _column(scope="batch")
    """Reward from the grader."""
    graded: Sequence[bool] | None = _column(scope="batch")
    """False if the grader gave no reward and ``raw_reward`` is a placeholder; None means all were graded."""
    truncated: Sequence[int] | None = _column()
    """1 if the response was truncated, else 0."""
    sample_indices: Sequence[int | None] | None = _column()
    rollout_ids: Sequence[int] = _column(required=True)
    """Execution that the sample belongs to; samples of a fanned-out execution share it."""
    loss_masks: Sequence[Ints] = _column(torch.int32, span="response", required=True)
    """[R] 1 for trained tokens, else 0."""
    rollout_mask_sums: Floats | None = _column(torch.float32)
    """Number of trained tokens of the sample's whole execution; the denominator of its loss."""
    rollout_log_probs: Sequence[Floats] | None = _column(
        torch.float32, span="response", read=lambda sample: sample.rollout_log_probs
    )
    """[R] log-probs from the engine that sampled the tokens."""
    teacher_log_probs: Sequence[Floats] | None = _column(
        torch.float32, span="response", read=lambda sample: sample.teacher_log_probs
    )
    """[R] log-probs from the distillation teacher."""
    teacher_top: Sequence[Any] | None = _column(
        torch.float32, span="response", read=lambda sample: (sample.metadata or {}).get("teacher_top")
    )
    """[R, 2, K] token ids and log-probs of the teacher's K most likely tokens (``--opd-top-k``)."""
    rollout_top_p_token_ids: Sequence[Ints] | None = _column(torch.int32)
    """Token ids of the nuclei of all response tokens, concatenated."""
    rollout_top_p_token_offsets: Sequence[Ints] | None = _column(torch.int32)
    """[R + 1] start of each nucleus; the last entry is the total count."""
    rollout_routed_experts: Sequence[Any] | None = _column(EXPERT_ID_DTYPE, span="sequence")
    """[at most L - 1, layers, top_k] experts chosen by the engine."""
    multimodal_train_inputs: Sequence[Any] | None = _column(read=lambda sample: sample.multimodal_train_inputs)
    """Argument name -> tensor, for the model's forward pass."""
    metadata: Sequence[Any] | None = _column(read=lambda sample: sample.train_metadata)
    round_number: Sequence[int | None] | None = _column(
        read=lambda sample: (sample.metadata or {}).get("round_number")
    )
    source_names: Sequence[str] | None = _column()
    """Data source of the sample; "unknown" if it has none."""
    prompt: Sequence[Any] | None = _column()
    extra: dict[str, Sequence[Any]] = field(default_factory=dict)
    """Additional columns from a custom converter or ``args.named_columns``."""

    @classmethod
    def from_dict(cls: type[Batch], data: Mapping[str, Any]) -> Batch:
        """Create a batch from a dict of columns; undeclared names go into ``extra``.

        Raises:
            DataError: a required column is missing.
        """
        missing = [name for name in cls.required() if data.get(name) is None]
        if missing:
            raise DataError(
                f"the train data lacks {', '.join(missing)}; each has one entry per sample; a converter given by "
                "--custom-convert-samples-to-train-data-path must return all required columns of "
                "slime/train_data/columns.py"
            )
        declared = {spec.name for spec in fields(cls)} - {"extra"}
        known = {name: values for name, values in data.items() if name in declared}
        return cls(**known, extra={name: values for name, values in data.items() if name not in declared})

    @classmethod
    def required(cls) -> list[str]:
        """Return the names of the required columns."""
        return [spec.name for spec in fields(cls) if spec.default is MISSING and spec.default_factory is MISSING]

    def to_dict(self) -> dict[str, Any]:
        """Return the existing columns by name, the dict that hooks get."""
        values = {spec.name: getattr(self, spec.name) for spec in fields(self) if spec.name != "extra"}
        return self.extra | {name: value for name, value in values.items() if value is not None}

    def columns(self) -> Iterator[tuple[str, Column, Any]]:
        """Yield (name, description, values) of each existing column."""
        for name, column in COLUMNS.items():
            if (values := getattr(self, name)) is not None:
                yield name, column, values
        for name, values in self.extra.items():
            yield name, Column(), values


COLUMNS: dict[str, Column] = {
    spec.name: spec.metadata["column"] for spec in fields(TrainBatch) if "column" in spec.metadata
}
"""Name -> column, in the order in which columns are sent to the trainer."""


@dataclass(kw_only=True, slots=True)
class RankBatch(TrainBatch):
    """One data-parallel rank's share of a ``TrainBatch``, in micro-batch order, with its schedule.

    Columns with a dtype hold CPU tensors.  Columns with scope "batch" hold the whole rollout.
    """

    partition: list[int]
    """[N] positions of the samples in the rollout."""
    total_lengths: list[int]
    """[N] L of each sample."""
    local_raw_reward: list[Any] | None = None
    """[N] raw rewards of this rank's samples."""
    micro_batch_indices: list[list[int]]
    """[micro-batch] positions within ``partition``."""
    num_microbatches: list[int]
    """[step] number of micro-batches, the same on every rank."""
    global_batch_sizes: list[int]
    """[step] number of executions that the step trains on, over all ranks."""

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields, with each tensor column joined into one array: pickling many small tensors is slow."""
        state = {spec.name: getattr(self, spec.name) for spec in fields(self)}
        return state | {name: _joined(values) for name, column, values in self.columns() if column.dtype is not None}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value.parts() if isinstance(value, _Joined) else value)


class _Joined(NamedTuple):
    """The tensors of a column joined into one array, for pickling."""

    values: np.ndarray
    sizes: list[int]

    def parts(self) -> list[Tensor]:
        """Split the array into tensors again, in writable memory."""
        return list(torch.split_with_sizes(torch.from_numpy(self.values.copy()), self.sizes))


def _joined(values: Any) -> Any:
    """Join a list of CPU tensors that differ only in length; return anything else unchanged."""
    if not (isinstance(values, list) and values and all(isinstance(value, Tensor) for value in values)):
        return values
    kinds = {(value.dtype, value.device.type, value.shape[1:]) for value in values}
    if len(kinds) > 1 or values[0].ndim == 0 or values[0].device.type != "cpu":
        return values
    return _Joined(torch.cat(values).numpy(), [len(value) for value in values])
