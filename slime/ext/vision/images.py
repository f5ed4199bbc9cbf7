"""The images of packed sequences: where the tower's output goes, and the positions of its tokens.

All of it follows from token ids and image sizes, and is computed on the host, where both are.

Shapes: L = tokens of a sequence; T = tokens of the micro-batch on this rank; I = images of a sequence or of the
micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slime.backends.megatron_utils.cp_utils import cp_rank
from slime.train_data.microbatch import PackingConfig, pack_thd
from slime.utils.errors import DataError


@dataclass(frozen=True, slots=True)
class ImageBatch:
    """The images of a micro-batch, on the host."""

    sequences: Sequence[Tensor]
    """[L] token ids of each sample, whole."""
    inputs: Sequence[Mapping[str, Any] | None]
    """Of each sample: ``pixel_values`` [patches, values], floats or bytes (``compact_pixels``), and
    ``image_grid_thw`` [I, 3], the patches of each image in time, height and width; None for one without images."""

    def grids(self) -> list[Tensor]:
        """Return ``image_grid_thw`` of each sample, [0, 3] for none.

        Raises:
            DataError: a sample has videos or sound.
        """
        none = torch.empty(0, 3, dtype=torch.long)
        for images in self.inputs:
            if images and ("image_grid_thw" not in images or any("video" in name for name in images)):
                raise DataError(f"a sample has {', '.join(images)}; the vision towers here take images alone")
        return [none if not images else images["image_grid_thw"].long().cpu() for images in self.inputs]


def place_images(tokens: Tensor, grids: Tensor, *, image_token: int, merge: int) -> tuple[Tensor, Tensor]:
    """Return the rows of the tower's output that a sequence takes, and its positions.

    Text advances all axes by one a token.  An image has the axes of its patches, from where it begins, and what
    follows begins after its longer side.

    Args:
        tokens: [L] ids.
        grids: [I, 3] patches of its images in time, height and width.
        image_token: id in the place of each of an image's tokens.  After the last image it is an ordinary token: a
            policy may sample it.
        merge: patches along a side of what becomes one token.

    Returns:
        int64 [L], the row among those of this sequence, -1 for text; and [3, L].

    Raises:
        DataError: there are fewer image tokens than the images have.
    """
    times, heights, widths = grids[:, 0], grids[:, 1] // merge, grids[:, 2] // merge
    sizes = times * heights * widths
    ends = sizes.cumsum(0)
    total = int(sizes.sum())
    is_image = tokens == image_token
    count = is_image.cumsum(0)
    is_image &= count <= total
    if int(is_image.sum()) != total:
        raise DataError(
            f"a sample has {int(is_image.sum())} image tokens ({image_token}) and images of {total}: "
            f"image_grid_thw is {grids.tolist()}. Tokens and images must come from the processor of --hf-checkpoint, "
            "and a prompt must not be cut after it."
        )
    row = count.clamp(max=total) - is_image.long()  # for text the first row that comes after it
    image = torch.searchsorted(ends, row, right=True)
    saved = F.pad((sizes - torch.maximum(heights, widths)).cumsum(0), (1, 0))
    positions = (torch.arange(len(tokens)) - saved[image]).expand(3, -1).clone()
    image, row = image[is_image], row[is_image]
    within = row - (ends - sizes)[image]
    start = positions[0, is_image] - within
    height, width = heights[image], widths[image]
    axes = (within // (height * width), within // width % height, within % width)
    positions[:, is_image] = start + torch.stack(axes)
    rows = torch.full_like(tokens, -1)
    rows[is_image] = row
    return rows, positions


@dataclass(frozen=True, slots=True)
class PlacedImages:
    """Sources of the embeddings and positions of this rank's tokens."""

    rows_T: Tensor
    """Row of the tower's output over the images of the whole micro-batch; -1 for text."""
    positions_3T: Tensor
    grids: Tensor
    """[I, 3] of all images."""
    pixels: Sequence[Mapping[str, Any]]
    """``pixel_values`` [patches, values] of each image, and ``pixel_range`` where they are bytes."""

    @classmethod
    def of(cls, images: ImageBatch, num_tokens: int, *, image_token: int, merge: int) -> PlacedImages | None:
        """Place the images of a micro-batch on this context-parallel rank; None where it has no images."""
        grids = images.grids()
        if not any(map(len, grids)):
            return None
        rows: list[Tensor] = []
        positions: list[Tensor] = []
        num_rows = 0
        for tokens, grid in zip(images.sequences, grids, strict=True):
            row, position = place_images(tokens, grid, image_token=image_token, merge=merge)
            rows.append(torch.where(row < 0, row, row + num_rows))
            positions.append(position)
            num_rows += int(grid.prod(1).sum()) // merge**2
        pixels = [
            {**inputs, "pixel_values": part}
            for grid, inputs in zip(grids, images.inputs, strict=True)
            if inputs
            for part in inputs["pixel_values"].split(grid.prod(1).tolist())
        ]
        packing = PackingConfig(cp_rank(), pad_multiple=num_tokens)
        axes = [pack_thd([position[axis] for position in positions], packing).tokens[0] for axis in range(3)]
        rows_T = pack_thd(rows, packing, pad_id=-1).tokens[0]
        return cls(rows_T, torch.stack(axes), torch.cat(grids), pixels)

    def of_rows(self, start: int, stop: int, merge: int) -> tuple[Tensor, Tensor, list[int]]:
        """Return what the tokens from ``start`` to ``stop`` need: their places, counted from ``start``, the rows that
        they take of the output for the images they need, and these images.
        """
        rows = self.rows_T[start:stop]
        places = (rows >= 0).nonzero()[:, 0]
        sizes = self.grids.prod(1) // merge**2
        ends = sizes.cumsum(0)
        image = torch.searchsorted(ends, rows[places], right=True)
        needed = image.unique()
        before = torch.zeros_like(sizes)
        before[needed] = F.pad(sizes[needed].cumsum(0), (1, 0))[:-1]
        return places, rows[places] - (ends - sizes)[image] + before[image], needed.tolist()
