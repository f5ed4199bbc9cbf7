"""The state of one trainer rank in one host buffer, from which the rank's successor resumes."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slime.flags.config import FlagConfig
from slime.weights.pinned_memory import aligned, host_bytes


class _Place(NamedTuple):
    """Position of a tensor in the data."""

    name: str
    dtype: torch.dtype
    shape: torch.Size
    begin: int

    @property
    def num_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class StateCopy:
    """Snapshot of a rank's tensors and other values after a rollout."""

    rollout_id: int
    header: bytes
    """Pickled tensor places and other values.  A rank reads only headers made by ranks of the same job."""
    data: Tensor
    """uint8 tensor ``[num_bytes]``: all tensors, one after the other."""

    @classmethod
    def take(
        cls, rollout_id: int, tensors: Mapping[str, Tensor], values: Mapping[str, Any], *, room: Tensor | None = None
    ) -> StateCopy:
        """Copy ``tensors`` to the host; they may change once this returns.

        Args:
            room: ``data`` of a copy that is no longer needed, reused if its size (and pinning) fit.
        """
        places, size = [], 0
        for name, tensor in tensors.items():
            places.append(_Place(name, tensor.dtype, tensor.shape, size))
            size += aligned(places[-1].num_bytes)
        has_cuda = torch.cuda.is_available()
        if room is None or room.numel() != size or room.is_pinned() != has_cuda:
            room = host_bytes(size, is_pinned=has_cuda)
        for place in places:
            _view(room, place).copy_(tensors[place.name].detach(), non_blocking=True)
        if has_cuda:
            torch.cuda.synchronize()
        return cls(rollout_id, pickle.dumps((places, dict(values))), room)

    def read(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the tensors, as views of :attr:`data`, and the other values."""
        places, values = pickle.loads(self.header)
        return {place.name: _view(self.data, place) for place in places}, values


def _view(data: Tensor, place: _Place) -> Tensor:
    return data[place.begin : place.begin + place.num_bytes].view(place.dtype).view(place.shape)


@dataclass(frozen=True, kw_only=True)
class CopyFlags(FlagConfig):
    """When actor and critic copy their state, and how long that may take."""

    state_copy_interval: int | None
    """Rollouts between two copies; None for no copies."""
    num_critic_only_steps: int
    train_timeout_s: float

    def is_due(self, rollout_id: int) -> bool:
        """Return True if the ranks copy their state after ``rollout_id``."""
        if self.state_copy_interval is None or rollout_id < self.num_critic_only_steps:
            return False
        return (rollout_id + 1) % self.state_copy_interval == 0
