"""The storages of a model's tensors by the names of their owners, which mean the same in the next engine."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield name and value of every parameter and buffer."""
    yield from model.named_parameters()
    yield from model.named_buffers()


class ModelMemory:
    """The storages of a model's parameters and buffers.  Of those that share one, the first owns it."""

    def __init__(self, model: nn.Module) -> None:
        self._tensors = {name: tensor.detach() for name, tensor in named_tensors(model)}
        self._device = next(model.parameters()).device
        self._bases: dict[tuple[str, torch.dtype], Tensor] = {}
        self._owners: dict[int, str] = {}
        for name, tensor in self._tensors.items():
            self._owners.setdefault(tensor.untyped_storage().data_ptr(), name)

    def owner_of(self, address: int) -> str | None:
        """Return the name of the tensor that owns the storage at an address; None where there is none."""
        return self._owners.get(address)

    def address_of(self, owner: str) -> int:
        """Return the address of a tensor's storage."""
        return self._tensors[owner].untyped_storage().data_ptr()

    def base(self, owner: str, dtype: torch.dtype) -> Tensor:
        """Return the first element of a tensor's storage, from which views count their offsets."""
        if (owner, dtype) not in self._bases:
            empty = torch.empty(0, dtype=dtype, device=self._device)
            self._bases[owner, dtype] = empty.set_(self._tensors[owner].untyped_storage(), 0, (), ())
        return self._bases[owner, dtype]
