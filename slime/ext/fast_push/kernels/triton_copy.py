"""The launches of ``CopyTable``: all tiles of all items by one kernel, whatever their dtypes and strides."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from slime.ext.fast_push.kernels.copy_2d import VECTOR_BYTES, matrices, tile_index
from slime.ext.fast_push.kernels.table_items import CopyItem, differing_bytes, source_view
from slime.ext.fast_push.kernels.triton_tiles import (
    FIELDS,
    FIRST_TILE,
    WORDS,
    form_of,
    load_descriptor,
    move_descriptors,
    move_tile,
    on_device,
)


@dataclass(frozen=True, slots=True)
class CopyShape:
    """Tile sizes of the kernel; the defaults were the fastest on an H100."""

    rows: int = 8
    columns: int = 256
    """Of a tile, in four-byte words or elements."""
    num_warps: int = 4


@triton.jit
def _copy_kernel(
    flat, owner, table, counts, FORMS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
    COMPARE: tl.constexpr,
):  # fmt: skip
    """Copy one tile per program."""
    program = tl.program_id(0)
    descriptor = load_descriptor(table + tl.load(owner + program).to(tl.int64) * FIELDS)
    _, first, _, _, _, src, _, _, dst, _, _, item, _ = descriptor
    dst = dst.to(tl.pointer_type(tl.uint8))
    count = move_tile(descriptor, program - first, flat + src, dst, FORMS, TILE_ROWS, TILE_COLUMNS, COMPARE)
    if COMPARE:
        if count > 0:
            tl.atomic_add(counts + item, count.to(tl.int64))


class CopyLaunch:
    """The table of one list of items on their device."""

    def __init__(self, items: Sequence[CopyItem], shape: CopyShape | None = None) -> None:
        self.shape = shape or CopyShape()
        self.items = items
        self.device = items[0].dst.device
        self.in_torch: list[int] = []
        """Items whose cast no kernel has."""
        descriptors: list[list[int]] = []
        tiles: list[int] = []
        for index, item in enumerate(items):
            if form_of(item.src_dtype, item.dst.dtype) is None:
                self.in_torch.append(index)
                continue
            for matrix in matrices(
                item.dst.shape,
                item.src_offset,
                item.src_strides,
                item.src_dtype.itemsize,
                item.dst.data_ptr(),
                item.dst.stride(),
                item.dst.element_size(),
            ):
                tile = (self.shape.rows, self.shape.columns)
                rows, counts = move_descriptors(matrix, item.src_dtype, item.dst.dtype, tile, index)
                descriptors += rows
                tiles += counts
        # Nearly every table has words; with them in all there are fewer kernels to compile.
        self.forms = functools.reduce(operator.or_, (row[0] | WORDS.value for row in descriptors), 0)
        if descriptors:
            table = torch.tensor(descriptors, dtype=torch.int64, device=self.device)
            self.owner, table[:, FIRST_TILE.value] = tile_index(tiles, self.device)
            self.table = table

    def copy(self, flat: Tensor) -> None:
        """Copy the bucket ``flat`` (uint8) into the destinations."""
        self._run(flat, None)
        for index in self.in_torch:
            item = self.items[index]
            item.dst.detach().copy_(source_view(item, flat))

    def count_differences(self, flat: Tensor) -> Tensor:
        """Return the number of differing bytes of each destination, int64 ``[items]``."""
        counts = torch.zeros(len(self.items), dtype=torch.int64, device=self.device)
        self._run(flat, counts)
        for index in self.in_torch:
            counts[index] = differing_bytes(self.items[index], flat)
        return counts

    def _run(self, flat: Tensor, counts: Tensor | None) -> None:
        if not self.forms:
            return
        if flat.data_ptr() % VECTOR_BYTES:
            raise ValueError(f"the bucket starts at an address that is no multiple of {VECTOR_BYTES}")
        with on_device(self.device):
            _copy_kernel[(len(self.owner),)](
                flat,
                self.owner,
                self.table,
                counts,
                FORMS=self.forms,
                TILE_ROWS=self.shape.rows,
                TILE_COLUMNS=self.shape.columns,
                COMPARE=counts is not None,
                num_warps=self.shape.num_warps,
            )
