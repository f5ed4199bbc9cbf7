"""Read the model in a ``torch_dist`` checkpoint, parameter by parameter, in one process and without building it.

Layers and experts that are stacked in one tensor on disk are returned one by one, and read in the slices in which they
were written; at most one slice is in memory.  Checkpoints of Megatron-LM can be read too; classes in them that are
not installed are skipped.
"""

from __future__ import annotations

import itertools
import re
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from slime.backends.megatron_utils.checkpoints.checkpoint_reader import CheckpointReader
from slime.utils.errors import DataError
from slime.weights.tensor_slice import TensorSlice

_STACKED_LAYERS = re.compile(r"^(.*\.layers)\.(?!\d+\.)(.*)$")
_STACKED_EXPERTS = re.compile(r"^(.*\.experts)\.experts\.(linear_fc[12])\.(weight|bias)$")
_LISTED_EXPERT = re.compile(r"^(.*\.experts)\.(?:local_experts|experts)\.(\d+)\.(linear_fc[12])\.(weight|bias)$")
_NOT_WEIGHTS = re.compile(r"optimizer|_state")


@dataclass(frozen=True)
class StoredSlice:
    """A slice of a tensor on disk that is read in one piece."""

    key: str
    """Name on disk."""
    slice: TensorSlice
    num_bytes: int


class TorchDistFolder:
    """One checkpoint folder, ``iter_0000012`` or ``release``."""

    def __init__(self, folder: str | Path, *, verify: bool = True) -> None:
        """Read the folder's metadata.

        Raises:
            DataError: it is not a complete checkpoint, or is damaged.
        """
        self._reader = CheckpointReader(folder, verify=verify)
        self.folder, self._metadata = self._reader.folder, self._reader.metadata

    def read_args(self) -> Namespace:
        """Return the arguments of the run that saved the checkpoint.

        Raises:
            DataError: the checkpoint has none.
        """
        args = self._reader.read_common().get("args")
        if not isinstance(args, Namespace):
            raise DataError(f"{self.folder}/common.pt holds no arguments, which say how to read the tensors")
        return args

    def vocabulary_rows(self) -> int | None:
        """Return the rows of the embedding, including padding; None if it has no embedding."""
        entry = self._metadata.state_dict_metadata.get("embedding.word_embeddings.weight")
        return entry.size[0] if isinstance(entry, TensorStorageMetadata) else None

    def slices(self) -> list[StoredSlice]:
        """List the model's tensors as the slices to read."""
        slices = []
        for key, entry in sorted(self._metadata.state_dict_metadata.items()):
            if not isinstance(entry, TensorStorageMetadata) or _NOT_WEIGHTS.search(key):
                continue
            size = torch.empty((), dtype=entry.properties.dtype).element_size()
            for bounds in itertools.product(*_intervals(entry, num_stacked_axes(key))):
                part = TensorSlice(tuple(begin for begin, _ in bounds), tuple(end - begin for begin, end in bounds))
                slices.append(StoredSlice(key, part, size * part.num_elements))
        return slices

    def read(self, stored: StoredSlice) -> list[tuple[str, Tensor]]:
        """Read the parameters of a slice, under their names in the whole model.  Thread-safe."""
        key, part = stored.key, stored.slice
        entry = self._metadata.state_dict_metadata[key]
        assert isinstance(entry, TensorStorageMetadata)
        try:
            tensor = torch.empty(part.sizes, dtype=entry.properties.dtype)
        except RuntimeError as error:
            raise DataError(f"{self.folder}: {key} is {list(part.sizes)}, which does not fit into memory") from error
        chunk = ChunkStorageMetadata(torch.Size(part.offsets), torch.Size(part.sizes))
        planner = _Into(tensor)
        self._reader.read_data(LoadPlan(create_read_items_for_chunk_list(key, entry, [chunk])), planner).wait()
        if planner.num_read != tensor.numel():
            raise DataError(f"{self.folder}: {key} is incomplete; parts of it were never written")
        return list(unstack(key, tensor, part.offsets))


def num_stacked_axes(key: str) -> int:
    """Return the number of leading axes of a tensor on disk that count layers or experts."""
    return bool(_STACKED_LAYERS.match(key)) + bool(_STACKED_EXPERTS.match(key))


def unstack(key: str, tensor: Tensor, offsets: Sequence[int]) -> Iterator[tuple[str, Tensor]]:
    """Yield name and view of every parameter in ``tensor``, which begins at ``offsets`` of the tensor ``key``."""
    axes = num_stacked_axes(key)
    for position in itertools.product(*(range(size) for size in tensor.shape[:axes])):
        numbers = [offset + index for offset, index in zip(offsets, position, strict=False)]
        name = key
        if match := _STACKED_EXPERTS.match(name):
            name = f"{match[1]}.{match[2]}.{match[3]}{numbers[-1]}"
        elif match := _LISTED_EXPERT.match(name):
            name = f"{match[1]}.{match[3]}.{match[4]}{match[2]}"
        if match := _STACKED_LAYERS.match(name):
            name = f"{match[1]}.{numbers[0]}.{match[2]}"
        yield name, tensor[position]


def _intervals(entry: TensorStorageMetadata, axes: int) -> list[list[tuple[int, int]]]:
    """Return each axis's intervals to read separately: as written if the axis is stacked, else one interval."""
    intervals = []
    for axis, size in enumerate(entry.size):
        starts = sorted({chunk.offsets[axis] for chunk in entry.chunks}) if axis < axes else [0]
        intervals.append(list(zip(starts, [*starts[1:], size], strict=True)))
    return intervals


class _Into(DefaultLoadPlanner):
    """Reads into one tensor."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self.num_read = 0
        self._tensor = tensor

    def lookup_tensor(self, index: Any) -> Tensor:
        """Return the tensor; a stored chunk is then read into a slice of it."""
        return self._tensor

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Count the elements of a chunk that was read in place."""
        self.num_read += tensor.numel()
