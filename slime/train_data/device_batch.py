"""A rank's rollout while it is trained on: the columns of its ``RankBatch`` on the device, and what the trainer adds.

Hooks of the trainer are promised a dict that they may change; :class:`DeviceBatch` is that dict, and gives slime's own
code the columns it reads as typed attributes.

Shapes: N = samples of this rank; L = tokens of a sample; R = tokens of its response; r = those of them that this
context-parallel rank has.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from torch import Tensor

T = TypeVar("T")


class _Always(Generic[T]):
    """An entry that a batch has by the time it is read, under the name of the attribute or under ``key``."""

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
    """An entry that is None where the batch does not have it."""

    def read(self, batch: DeviceBatch) -> T | None:
        """Return the entry, or None."""
        return batch.get(self.key)


class DeviceBatch(dict[str, Any]):
    """The columns by name, one entry per sample in each; the key of a column is the name of its attribute.

    ``slime.train_data.columns`` says what the columns of a rollout hold.  Those without an attribute here, a custom
    converter's among them, are read by key.
    """

    tokens = _Always[list[Tensor]]()
    """[L] int64."""
    host_tokens = _Sometimes[list[Tensor]]()
    """The same on the host, where samples have images."""
    total_lengths = _Always[list[int]]()
    """L."""
    response_lengths = _Always[list[int]]()
    """R."""
    loss_masks = _Always[list[Tensor]]()
    """[R] int32, whole on every context-parallel rank."""
    rollout_mask_sums = _Always[Tensor]()
    """[N] fp32."""
    rewards = _Always[list[float]]()
    raw_reward = _Sometimes[list[Any]]()
    graded = _Sometimes[list[bool]]()
    """Both of the whole rollout."""
    rollout_log_probs = _Sometimes[list[Tensor]]()
    """[r] fp32, as all columns of tokens below."""
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
    """[step] executions that the step trains on, over all ranks."""

    # --- what the trainer computes, on the last pipeline stage
    log_probs = _Sometimes[list[Tensor]]()
    """[r] of the old policy."""
    ref_log_probs = _Sometimes[list[Tensor]]()
    critic_values = _Always[list[Tensor]]("values")
    """[r] of the critic, if there is one; the key is ``values``, which is a method of a dict."""
    kl = _Always[list[Tensor]]()
    """[r] from the reference; zeros without ``--kl-coef``."""
    advantages = _Always[list[Tensor]]()
    returns = _Always[list[Tensor]]()
