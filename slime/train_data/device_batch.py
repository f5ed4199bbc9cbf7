"""A rank's rollout during training: the columns of its ``RankBatch`` on the device, and what the trainer computes.

Trainer hooks get a mutable dict.  :class:`DeviceBatch` is that dict, and gives slime's own code typed attributes for
the columns it reads.

Shapes: N = samples of this rank; L = tokens of a sample; R = tokens of its response; r = response tokens on this
context-parallel rank.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from torch import Tensor

T = TypeVar("T")


class _Always(Generic[T]):
    """An entry that exists whenever it is read, stored under ``key`` or else under the attribute's name."""

    def __init__(self, key: str = "") -> None:
        self.key = key

    def __set_name__(self, owner: type, name: str) -> None:
        self.key = self.key or name

    def __set__(self, batch: DeviceBatch, value: T) -> None:
        batch[self.key] = value

    def __get__(self, batch: DeviceBatch | None, owner: type) -> T:
        return self if batch is None else self.read(batch)  # type: ignore[return-value]

    def read(self, batch: DeviceBatch) -> T:
        """Return the entry."""
        return batch[self.key]


class _Sometimes(_Always[T | None]):
    """An entry that is None if the batch does not have it."""

    def read(self, batch: DeviceBatch) -> T | None:
        """Return the entry, or None."""
        return batch.get(self.key)


class DeviceBatch(dict[str, Any]):
    """Columns by name, each with one entry per sample; a column's key is its attribute name.

    ``slime.train_data.columns`` documents the columns of a rollout.  Columns without an attribute here, such as those
    of a custom converter, are read by key.
    """

    tokens = _Always[list[Tensor]]()
    """[L] int64."""
    host_tokens = _Sometimes[list[Tensor]]()
    """``tokens`` on the host, if samples have images."""
    total_lengths = _Always[list[int]]()
    """L."""
    response_lengths = _Always[list[int]]()
    """R."""
    loss_masks = _Always[list[Tensor]]()
    """[R] int32, complete on every context-parallel rank."""
    rollout_mask_sums = _Always[Tensor]()
    """[N] fp32."""
    rewards = _Always[list[float]]()
    raw_reward = _Sometimes[list[Any]]()
    graded = _Sometimes[list[bool]]()
    """``raw_reward`` and ``graded`` cover the whole rollout."""
    rollout_log_probs = _Sometimes[list[Tensor]]()
    """[r] fp32, like all per-token columns below."""
    teacher_log_probs = _Sometimes[list[Tensor]]()
    rollout_routed_experts = _Sometimes[list[Tensor]]()
    sample_indices = _Sometimes[list[int]]()

    # --- the schedule
    partition = _Sometimes[list[int]]()
    """Positions of the samples in the rollout."""
    micro_batch_indices = _Always[list[list[int]]]()
    """[micro-batch] positions within ``partition``."""
    num_microbatches = _Always[list[int]]()
    """[step]"""
    global_batch_sizes = _Always[list[int]]()
    """[step] number of executions that the step trains on, over all ranks."""

    # --- computed by the trainer, on the last pipeline stage
    log_probs = _Sometimes[list[Tensor]]()
    """[r] log-probs of the old policy."""
    ref_log_probs = _Sometimes[list[Tensor]]()
    critic_values = _Always[list[Tensor]]("values")
    """[r] values from the critic, if any.  The key is ``values``, which cannot be an attribute name: dict has it."""
    kl = _Always[list[Tensor]]()
    """[r] KL from the reference; zeros without ``--kl-coef``."""
    advantages = _Always[list[Tensor]]()
    returns = _Always[list[Tensor]]()
