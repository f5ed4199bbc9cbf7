"""Folders that hold all experts of a layer in one tensor, seen as if each expert had its own tensors.

Published Qwen3.5 checkpoints are laid out so:

    X.experts.gate_up_proj [E, 2 I, h]   =   X.experts.{e}.gate_proj.weight, X.experts.{e}.up_proj.weight [I, h] each
    X.experts.down_proj [E, h, I]        =   X.experts.{e}.down_proj.weight [h, I]

Those of Qwen3-VL have every matrix transposed: [E, h, 2 I] and [E, I, h].  The shapes of both tensors tell.

Everything in memory and on the wire has the names on the right; a folder is written as its source is.

gpt-oss has such a tensor for biases too, and engines that load nothing else.  There ``X[3]`` names expert 3's row of
``X`` in weight maps alone; :func:`join_rows` puts the rows together for pushes and folders.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from slime.utils.errors import DataError

_STACK = re.compile(r"(.+\.experts)\.(gate_up|down)_proj")
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


_ROW = re.compile(r"(.+)\[(\d+)\]")


def row_of(name: str) -> tuple[str, int] | None:
    """Return tensor and row that ``X[3]`` names; None for any other name."""
    match = _ROW.fullmatch(name)
    return None if match is None else (match[1], int(match[2]))


def join_rows(tensors: Iterable[tuple[str, Tensor]], num_rows: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors, the rows of one joined in the place of the last of them; also on the meta device.

    Raises:
        DataError: some rows of a tensor did not come.
    """
    joined: dict[str, Tensor] = {}
    missing: dict[str, set[int]] = {}
    for name, tensor in tensors:
        row = row_of(name)
        if row is None:
            yield name, tensor
            continue
        whole, index = row
        if whole not in joined:
            joined[whole] = tensor.new_empty((num_rows, *tensor.shape))
            missing[whole] = set(range(num_rows))
        joined[whole][index].copy_(tensor)
        missing[whole].discard(index)
        if not missing[whole]:
            del missing[whole]
            yield whole, joined.pop(whole)
    if missing:
        name, rows = next(iter(missing.items()))
        raise DataError(f"{name} is made of {num_rows} experts (--num-experts); number {min(rows)} did not come.")


class Stack(NamedTuple):
    """A tensor of all experts of a layer."""

    num_experts: int
    is_transposed: bool = False
    """The matrices have their inputs in the rows."""

    def matrices(self, rows: Tensor) -> Tensor:
        """Return experts' matrices [..., out, in] for their rows of the stack, or the reverse."""
        return rows.mT if self.is_transposed else rows


class Place(NamedTuple):
    """The part of a stack that is one expert's tensor."""

    stack: str
    expert: int
    half: int | None
    """Of the rows: 0 for gate, 1 for up; None for all."""

    def cut(self, matrix: Tensor) -> Tensor:
        """Return the tensor, given the expert's matrix in the stack."""
        return matrix if self.half is None else matrix.chunk(2)[self.half]


def is_stack(name: str) -> bool:
    """Return True for a tensor of all experts of a layer."""
    return _STACK.fullmatch(name) is not None


def expert_names(stack: str, expert: int) -> tuple[str, ...]:
    """Return the names of one expert's tensors in a stack, from the first rows to the last."""
    match = _STACK.fullmatch(stack)
    assert match is not None, f"{stack} is no stack of experts"
    parts = ("gate", "up") if match[2] == "gate_up" else ("down",)
    return tuple(f"{match[1]}.{expert}.{part}_proj.weight" for part in parts)


def place_of(name: str) -> Place | None:
    """Return the position of an expert's tensor if experts are stacked; None for any other tensor."""
    match = _EXPERT.fullmatch(name)
    if match is None:
        return None
    if match[3] == "down":
        return Place(f"{match[1]}.down_proj", int(match[2]), None)
    return Place(f"{match[1]}.gate_up_proj", int(match[2]), ("gate", "up").index(match[3]))


class ExpertStacker:
    """Puts experts' tensors together again, as the folder ``like`` has them; holds those of unfinished stacks.

    Args:
        stacks: of the folder, by name; empty where experts are not stacked.
    """

    def __init__(self, stacks: Mapping[str, Stack]) -> None:
        self._stacks = stacks
        self._matrices: dict[str, dict[tuple[int, int], Tensor]] = {}

    def stack(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors, a stack in the place of the last tensor of its experts."""
        for name, tensor in tensors:
            place = place_of(name)
            if place is None or place.stack not in self._stacks:
                yield name, tensor
                continue
            held = self._matrices.setdefault(place.stack, {})
            # A copy: the caller may fill the buffer again.
            held[place.expert, place.half or 0] = tensor.detach().to("cpu", copy=True)
            stack, num_parts = self._stacks[place.stack], len(expert_names(place.stack, 0))
            if len(held) == stack.num_experts * num_parts:
                joined = _join(self._matrices.pop(place.stack), num_parts)
                yield place.stack, stack.matrices(joined).contiguous()

    def finish(self) -> None:
        """Check that no expert is missing.

        Raises:
            DataError: a stack has some of its experts only.
        """
        if self._matrices:
            name, held = next(iter(self._matrices.items()))
            raise DataError(
                f"{name} is made of {self._stacks[name].num_experts} experts, of which "
                f"{len({expert for expert, _ in held})} came; --num-experts is not that of the folder that names it."
            )


def _join(held: dict[tuple[int, int], Tensor], num_parts: int) -> Tensor:
    experts: Sequence[int] = sorted({expert for expert, _ in held})
    return torch.stack([torch.cat([held[expert, part] for part in range(num_parts)]) for expert in experts])


def tensors_in(name: str, stacks: Mapping[str, Stack]) -> list[str]:
    """Return the names of the tensors in one that a folder stores: its own, or those of all experts of a stack.

    ``stacks`` are the folder's :func:`find_stacks`.
    """
    if name not in stacks:
        return [name]
    return [part for expert in range(stacks[name].num_experts) for part in expert_names(name, expert)]


def find_stacks(shapes: Mapping[str, Sequence[int]]) -> dict[str, Stack]:
    """Return the stacks among the tensors of a folder, given their shapes.

    A stack with biases beside it is gpt-oss's, whose experts have no names.
    """
    return {
        name: Stack(int(shape[0]), _is_transposed(name, shapes))
        for name, shape in shapes.items()
        if is_stack(name) and len(shape) == 3 and f"{name}_bias" not in shapes
    }


def _is_transposed(name: str, shapes: Mapping[str, Sequence[int]]) -> bool:
    """Return True where gate and up, side by side, are twice as wide as down is high."""
    layer = name.rpartition(".")[0]
    gate_up, down = (tuple(shapes.get(f"{layer}.{part}_proj", ())) for part in ("gate_up", "down"))
    return len(gate_up) == len(down) == 3 and (gate_up[1], gate_up[2]) == (down[2], 2 * down[1])


def by_expert(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a folder with every stack taken apart into its experts'."""
    stacks = find_stacks({name: tensor.shape for name, tensor in tensors.items()})
    for name, tensor in tensors.items():
        if name not in stacks:
            yield name, tensor
            continue
        for expert, matrix in enumerate(stacks[name].matrices(tensor)):
            names = expert_names(name, expert)
            yield from zip(names, matrix.chunk(len(names)), strict=True)
