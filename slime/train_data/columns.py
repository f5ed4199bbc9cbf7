"""The typed batch between rollout and trainer: one table of columns.

Every field of ``TrainBatch`` is a column, and its ``Column`` describes the way of its entries from the samples to the
loss: ``convert`` fills it, ``split`` cuts it by data-parallel rank, the trainer makes tensors of it and slices those
with a span for context parallelism.  A column is added here and nowhere else.

Hooks get and return plain dicts: ``to_dict`` and ``from_dict``.

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
    """The way of one column from the samples to the loss."""

    dtype: torch.dtype | None = None
    """Tensor dtype on the trainer, one tensor per sample; None leaves Python objects as they are."""
    scope: Literal["sample", "batch"] = "sample"
    """"sample": one entry per sample, cut by data-parallel rank. "batch": every rank gets the whole list."""
    span: Literal["sequence", "response"] | None = None
    """The tokens that an entry covers, hence the way context parallelism slices it."""
    read: Callable[[Sample], Any] | None = None
    """Returns a sample's entry, or None.  The column exists once any sample has one; with the span "response" then
    all must, with R entries each.  None here: ``convert`` computes the column."""


def _column(dtype: torch.dtype | None = None, *, required: bool = False, **how: Any) -> Any:
    """Declare a column; a required one must be in the dict of a custom converter."""
    metadata = {"column": Column(dtype, **how)}
    return field(metadata=metadata) if required else field(default=None, metadata=metadata)


@dataclass(kw_only=True, slots=True)
class TrainBatch:
    """The train data of one rollout: one entry per sample in each column."""

    tokens: Sequence[Ints] = _column(torch.int64, span="sequence", required=True)
    """[L] ids of prompt and response."""
    response_lengths: Sequence[int] = _column(required=True)
    """R."""
    rewards: Sequence[float] = _column(required=True)
    """Reward as the advantage estimator takes it, relative to the group where it asks for that."""
    raw_reward: Sequence[Any] | None = _column(scope="batch")
    """Reward as the grader gave it."""
    graded: Sequence[bool] | None = _column(scope="batch")
    """False where none was given, so that ``raw_reward`` has a stand-in; None is True everywhere."""
    truncated: Sequence[int] | None = _column()
    """1 where the response was cut off."""
    sample_indices: Sequence[int | None] | None = _column()
    rollout_ids: Sequence[int] = _column(required=True)
    """Execution of a prompt that the sample belongs to; siblings of a fan-out share it."""
    loss_masks: Sequence[Ints] = _column(torch.int32, span="response", required=True)
    """[R] 1 where a token is trained."""
    rollout_mask_sums: Floats | None = _column(torch.float32)
    """Trained tokens of the sample's whole execution, by which the loss divides."""
    rollout_log_probs: Sequence[Floats] | None = _column(
        torch.float32, span="response", read=lambda sample: sample.rollout_log_probs
    )
    """[R] log-probs of the engine that sampled."""
    teacher_log_probs: Sequence[Floats] | None = _column(
        torch.float32, span="response", read=lambda sample: sample.teacher_log_probs
    )
    """[R] log-probs of the teacher that is distilled."""
    teacher_top: Sequence[Any] | None = _column(
        torch.float32, span="response", read=lambda sample: (sample.metadata or {}).get("teacher_top")
    )
    """[R, 2, K] ids and log-probs of the teacher's likeliest tokens (``--opd-top-k``)."""
    rollout_top_p_token_ids: Sequence[Ints] | None = _column(torch.int32)
    """Ids of the nuclei of all response tokens, one after the other."""
    rollout_top_p_token_offsets: Sequence[Ints] | None = _column(torch.int32)
    """[R + 1] where each nucleus begins."""
    rollout_routed_experts: Sequence[Any] | None = _column(EXPERT_ID_DTYPE, span="sequence")
    """[at most L - 1, layers, experts of a token] the engine's choices."""
    multimodal_train_inputs: Sequence[Any] | None = _column(read=lambda sample: sample.multimodal_train_inputs)
    """Name -> tensor, for the model's forward."""
    metadata: Sequence[Any] | None = _column(read=lambda sample: sample.train_metadata)
    round_number: Sequence[int | None] | None = _column(
        read=lambda sample: (sample.metadata or {}).get("round_number")
    )
    source_names: Sequence[str] | None = _column()
    """Data source of the sample, "unknown" where it has none."""
    prompt: Sequence[Any] | None = _column()
    extra: dict[str, Sequence[Any]] = field(default_factory=dict)
    """Further columns, of a custom converter or of ``args.named_columns``."""

    @classmethod
    def from_dict(cls: type[Batch], data: Mapping[str, Any]) -> Batch:
        """Return the batch of a dict of columns; names that are not declared go into ``extra``.

        Raises:
            DataError: a required column is missing.
        """
        missing = [name for name in cls.required() if data.get(name) is None]
        if missing:
            raise DataError(
                f"the train data lacks {', '.join(missing)}; each is one entry per sample; a converter given by "
                "--custom-convert-samples-to-train-data-path must return all required columns of "
                "slime/train_data/columns.py"
            )
        declared = {spec.name for spec in fields(cls)} - {"extra"}
        known = {name: values for name, values in data.items() if name in declared}
        return cls(**known, extra={name: values for name, values in data.items() if name not in declared})

    @classmethod
    def required(cls) -> list[str]:
        """Return the names of the columns that a batch cannot do without."""
        return [spec.name for spec in fields(cls) if spec.default is MISSING and spec.default_factory is MISSING]

    def to_dict(self) -> dict[str, Any]:
        """Return the columns that exist, by name: what hooks are promised."""
        values = {spec.name: getattr(self, spec.name) for spec in fields(self) if spec.name != "extra"}
        return self.extra | {name: value for name, value in values.items() if value is not None}

    def columns(self) -> Iterator[tuple[str, Column, Any]]:
        """Yield name, description and values of each column that exists."""
        for name, column in COLUMNS.items():
            if (values := getattr(self, name)) is not None:
                yield name, column, values
        for name, values in self.extra.items():
            yield name, Column(), values


COLUMNS: dict[str, Column] = {
    spec.name: spec.metadata["column"] for spec in fields(TrainBatch) if "column" in spec.metadata
}
"""Name to column, in the order in which they are shipped."""


@dataclass(kw_only=True, slots=True)
class RankBatch(TrainBatch):
    """One data-parallel rank's share of a ``TrainBatch``, in micro-batch order, and its schedule.

    Columns with a dtype hold CPU tensors; those of the batch stay whole.
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
    """[step] micro-batches, the same on every rank."""
    global_batch_sizes: list[int]
    """[step] executions that the step trains on, over all ranks."""

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields, each column of tensors as one array: alone, a tensor takes longer than its numbers."""
        state = {spec.name: getattr(self, spec.name) for spec in fields(self)}
        return state | {name: _joined(values) for name, column, values in self.columns() if column.dtype is not None}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value.parts() if isinstance(value, _Joined) else value)


class _Joined(NamedTuple):
    """The tensors of a column on their way to a rank."""

    values: np.ndarray
    sizes: list[int]

    def parts(self) -> list[Tensor]:
        """Return the tensors, in memory that may be written to."""
        return list(torch.split_with_sizes(torch.from_numpy(self.values.copy()), self.sizes))


def _joined(values: Any) -> Any:
    """Return a list of CPU tensors that differ in length alone as one array; all else as it is."""
    if not (isinstance(values, list) and values and all(isinstance(value, Tensor) for value in values)):
        return values
    kinds = {(value.dtype, value.device.type, value.shape[1:]) for value in values}
    if len(kinds) > 1 or values[0].ndim == 0 or values[0].device.type != "cpu":
        return values
    return _Joined(torch.cat(values).numpy(), [len(value) for value in values])
