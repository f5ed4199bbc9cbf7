"""Small models whose ``load_weights`` does what SGLang's do: fuse, slice, stack, join, pad, cast, compute."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.zeros(*shape, dtype=dtype), requires_grad=False)


class Fused(nn.Module):
    """Rank 1 of 2 of a model with fused qkv, a row-parallel projection, stacked experts and a padded vocabulary."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.qkv = parameter(4 + 2 + 2, 6, dtype=dtype)
        self.o = parameter(6, 4, dtype=dtype)
        self.experts = parameter(2, 2 * 3, 6, dtype=dtype)
        self.embed = parameter(5, 6, dtype=dtype)
        self.num_loads = 0

    @staticmethod
    def tensors(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        """HF tensors with a different value in every element."""
        shapes = {
            "q": (8, 6),
            "k": (4, 6),
            "v": (4, 6),
            "o": (6, 8),
            "embed": (8, 6),
            "gate.0": (3, 6),
            "up.0": (3, 6),
        }
        shapes |= {"gate.1": (3, 6), "up.1": (3, 6), "other.layer": (3,)}
        tensors, start = {}, 1
        for name, shape in shapes.items():
            size = torch.Size(shape).numel()
            tensors[name] = torch.arange(start, start + size, dtype=torch.float32).view(shape).to(dtype)
            start += size
        return tensors

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.num_loads += 1
        for name, tensor in weights:
            self.load(name, tensor)

    def load(self, name: str, tensor: Tensor) -> None:
        if name in "qkv":
            start, size = {"q": (0, 4), "k": (4, 2), "v": (6, 2)}[name]
            target = self.qkv.data.narrow(0, start, size)
            assert tensor.shape[1:] == target.shape[1:], f"{tensor.shape=}"
            target.copy_(tensor.narrow(0, size, size))
        elif name == "o":
            self.o.data.copy_(tensor[:, 4:])
        elif name == "embed":
            part = tensor[4:]
            self.embed[: part.shape[0]].data.copy_(part)
            self.embed[part.shape[0] :].data.fill_(0)
        elif name.startswith(("gate", "up")):
            kind, expert = name.split(".")
            self.experts.data[int(expert)].narrow(0, 0 if kind == "gate" else 3, 3).copy_(tensor)


class Joined(nn.Module):
    """Joins two tensors before loading them, and derives a value from the result."""

    def __init__(self) -> None:
        super().__init__()
        self.a = parameter(5, 4)
        self.doubled = torch.zeros(5, 4)
        self.num_loads = 0

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.num_loads += 1
        waiting: dict[str, Tensor] = {}
        for name, tensor in weights:
            waiting[name] = tensor
            if {"q_a", "kv_a"} <= waiting.keys():
                self.a.data.copy_(torch.cat([waiting["q_a"], waiting["kv_a"]], dim=0))
        self.post_load_weights()

    def post_load_weights(self) -> None:
        self.doubled.copy_(self.a.data * 2)


class Computing(nn.Module):
    """Computes with one tensor, reads one, and copies one."""

    def __init__(self) -> None:
        super().__init__()
        self.decay = parameter(4)
        self.scale = parameter(1)
        self.plain = parameter(4, dtype=torch.bfloat16)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            if name == "decay":
                self.decay.data.copy_(-torch.exp(tensor.float()))
            elif name == "scale":
                self.scale.data.fill_(tensor.item())
            else:
                self.plain.data.copy_(tensor.float())
