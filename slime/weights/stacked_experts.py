"""Presents folders that store all experts of a layer in one tensor as if each expert had its own tensors.

Published Qwen3.5 checkpoints use this layout:

    X.experts.gate_up_proj [E, 2 I, h]   =   X.experts.{e}.gate_proj.weight, X.experts.{e}.up_proj.weight [I, h] each
    X.experts.down_proj [E, h, I]        =   X.experts.{e}.down_proj.weight [h, I]

Qwen3-VL checkpoints have every matrix transposed: [E, h, 2 I] and [E, I, h].  The two tensors' shapes tell them apart.

In memory and on the wire, tensors have the names on the right; a folder is written in the layout of its source.

gpt-oss stacks biases too, and its engines load only stacked tensors.  There, ``X[3]`` is a name for expert 3's row of
``X`` that exists only in weight maps; :func:`join_rows` joins the rows for pushes and folders.
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
    """Return ``("X", 3)`` for ``X[3]``; None for names of another form."""
    match = _ROW.fullmatch(name)
    return None if match is None else (match[1], int(match[2]))


def join_rows(tensors: Iterable[tuple[str, Tensor]], num_rows: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors, with the rows of a tensor joined and yielded at its last row; works on the meta device.

    Raises:
        DataError: rows of a tensor are missing.
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
    """A tensor that holds all experts of a layer."""

    num_experts: int
    is_transposed: bool = False
    """True if matrices are stored as [in, out]."""

    def matrices(self, rows: Tensor) -> Tensor:
        """Convert rows of the stack to matrices [..., out, in], or matrices back to rows."""
        return rows.mT if self.is_transposed else rows


class Place(NamedTuple):
    """The part of a stack that holds one tensor of one expert."""

    stack: str
    expert: int
    half: int | None
    """Half of the matrix's rows: 0 for gate, 1 for up; None for all rows."""

    def cut(self, matrix: Tensor) -> Tensor:
        """Return the tensor's rows of the expert's matrix."""
        return matrix if self.half is None else matrix.chunk(2)[self.half]


def is_stack(name: str) -> bool:
    """Return True if ``name`` is a tensor that holds all experts of a layer."""
    return _STACK.fullmatch(name) is not None


def expert_names(stack: str, expert: int) -> tuple[str, ...]:
    """Return the names of one expert's tensors in a stack, in row order."""
    match = _STACK.fullmatch(stack)
    assert match is not None, f"{stack} is not a stack of experts"
    parts = ("gate", "up") if match[2] == "gate_up" else ("down",)
    return tuple(f"{match[1]}.{expert}.{part}_proj.weight" for part in parts)


def place_of(name: str) -> Place | None:
    """Return where an expert's tensor lies if experts are stacked; None for any other tensor."""
    match = _EXPERT.fullmatch(name)
    if match is None:
        return None
    if match[3] == "down":
        return Place(f"{match[1]}.down_proj", int(match[2]), None)
    return Place(f"{match[1]}.gate_up_proj", int(match[2]), ("gate", "up").index(match[3]))


class ExpertStacker:
    """Rebuilds a folder's expert stacks from per-expert tensors, buffering incomplete stacks on the host.

    Args:
        stacks: the folder's stacks by name; empty if experts are not stacked.
    """

    def __init__(self, stacks: Mapping[str, Stack]) -> None:
        self._stacks = stacks
        self._matrices: dict[str, dict[tuple[int, int], Tensor]] = {}

    def stack(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors, with a stack in place of the last of its experts' tensors."""
        for name, tensor in tensors:
            place = place_of(name)
            if place is None or place.stack not in self._stacks:
                yield name, tensor
                continue
            held = self._matrices.setdefault(place.stack, {})
            # Copied, because the caller may reuse the buffer.
            held[place.expert, place.half or 0] = tensor.detach().to("cpu", copy=True)
            stack, num_parts = self._stacks[place.stack], len(expert_names(place.stack, 0))
            if len(held) == stack.num_experts * num_parts:
                joined = _join(self._matrices.pop(place.stack), num_parts)
                yield place.stack, stack.matrices(joined).contiguous()

    def finish(self) -> None:
        """Check that no expert is missing.

        Raises:
            DataError: a stack is incomplete.
        """
        if self._matrices:
            name, held = next(iter(self._matrices.items()))
            raise DataError(
                f"{name} is made of {self._stacks[name].num_experts} experts, of which "
                f"{len({expert for expert, _ in held})} came; --num-experts does not match the source folder."
            )


def _join(held: dict[tuple[int, int], Tensor], num_parts: int) -> Tensor:
    experts: Sequence[int] = sorted({expert for expert, _ in held})
    return torch.stack([torch.cat([held[expert, part] for part in range(num_parts)]) for expert in experts])


def tensors_in(name: str, stacks: Mapping[str, Stack]) -> list[str]:
    """Return the names of all experts' tensors in a stack; for any other stored tensor, just its own name.

    ``stacks`` are the folder's :func:`find_stacks`.
    """
    if name not in stacks:
        return [name]
    return [part for expert in range(stacks[name].num_experts) for part in expert_names(name, expert)]


def find_stacks(shapes: Mapping[str, Sequence[int]]) -> dict[str, Stack]:
    """Return the stacks among a folder's tensors, given their shapes.

    A stack with biases is gpt-oss's and is left out, because its experts have no names of their own.
    """
    return {
        name: Stack(int(shape[0]), _is_transposed(name, shapes))
        for name, shape in shapes.items()
        if is_stack(name) and len(shape) == 3 and f"{name}_bias" not in shapes
    }


def _is_transposed(name: str, shapes: Mapping[str, Sequence[int]]) -> bool:
    """Return True if the shapes are [E, h, 2 I] for gate_up and [E, I, h] for down."""
    layer = name.rpartition(".")[0]
    gate_up, down = (tuple(shapes.get(f"{layer}.{part}_proj", ())) for part in ("gate_up", "down"))
    return len(gate_up) == len(down) == 3 and (gate_up[1], gate_up[2]) == (down[2], 2 * down[1])


def by_expert(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield a folder's tensors with every stack split into its experts' tensors."""
    stacks = find_stacks({name: tensor.shape for name, tensor in tensors.items()})
    for name, tensor in tensors.items():
        if name not in stacks:
            yield name, tensor
            continue
        for expert, matrix in enumerate(stacks[name].matrices(tensor)):
            names = expert_names(name, expert)
            yield from zip(names, matrix.chunk(len(names)), strict=True)
