"""Convert a Hugging Face checkpoint to a ``torch_dist`` checkpoint, tensor by tensor.

The model is built only for its names, shapes and layout: its parameters are memory that nothing ever touches, which
takes up addresses but no pages.  When the writer asks for a parameter, the Hugging Face tensors that it consists of
are read, joined and sliced, and released once they are written.
"""

from __future__ import annotations

import bisect
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from torch import Tensor
from tqdm import tqdm

from slime.backends.megatron_utils.checkpoint import (
    RELEASE,
    checkpoint_folder,
    common_state,
    make_empty_folder,
    model_state,
    publish_checkpoint,
)
from slime.backends.megatron_utils.checkpoints.checkpoint_writer import HostPlanner, Shards, write_checkpoint
from slime.backends.megatron_utils.flags.model_dims import model_dims
from slime.backends.megatron_utils.hf_to_megatron import check_all_used, read_shard
from slime.backends.megatron_utils.hf_to_megatron.tensors import HfTensors
from slime.backends.megatron_utils.model import build_model
from slime.backends.megatron_utils.models import family_of_folder
from slime.backends.megatron_utils.models.rule import WeightMap
from slime.backends.megatron_utils.parameters import Shard, iter_global_parameters
from slime.compose import parts
from slime.ray.parts import load_all
from slime.train_data.model_dims import ModelDims
from slime.utils.distributed_utils import gather_objects, init_gloo_group


def convert_hf_checkpoint(args: Namespace, source: str | Path) -> Path:
    """Write ``{--save}/release`` from the Hugging Face folder ``source``.  Collective.

    Args:
        source: folder with ``config.json`` and safetensors.

    Returns:
        The checkpoint's folder, already published.

    Raises:
        ConfigError: the model type is not known.
        DataError: a tensor is missing, has another shape, or would be left unused.
    """
    without_init = Namespace(**{**vars(args), "use_cpu_initialization": True, "perform_initialization": False})
    transforms = load_all(parts(args).transforms)
    model = build_model(without_init, transforms=transforms, wrap_with_ddp=False, on_accelerator=False)
    _mark_splits(model)
    folder = checkpoint_folder(args.save, RELEASE)
    make_empty_folder(folder)
    with HfTensors(source, verify=args.verify_checkpoint) as tensors, _progress() as bar:
        weight_map, dims = family_of_folder(source, args.model_name).weight_map, model_dims(args)
        weights = _Weights(model, tensors, weight_map, dims, bar)
        state = {**common_state(args, RELEASE), **model_state(model)}
        # One file, whose tensors are written in order, so that what is read serves the tensors that follow.
        write_checkpoint(state, folder, planner=_Planner(weights), writer_threads=1, resplit=weights.in_reading_order)
        # Each rank has read only what it writes.
        tensors.read = set().union(*gather_objects(tensors.read))
        check_all_used(tensors, weight_map, dims)
    if dist.get_rank() == 0:
        publish_checkpoint(args.save, RELEASE)
    dist.barrier(group=init_gloo_group())
    return folder


def _mark_splits(model: Sequence[torch.nn.Module]) -> None:
    """Set how tensor parallelism splits each matrix; megatron-core sets this while it initializes them."""
    dims = {ColumnParallelLinear: 0, VocabParallelEmbedding: 0, RowParallelLinear: 1}
    for chunk in model:
        for module in chunk.modules():
            dim = next((dim for kind, dim in dims.items() if isinstance(module, kind)), None)
            weight: Any = getattr(module, "weight", None)
            if dim is not None and weight is not None:
                weight.tensor_model_parallel, weight.partition_dim = True, dim


def _progress() -> tqdm:
    """Return a progress bar over this rank's bytes, shown only by rank 0 on a terminal."""
    return tqdm(desc="convert", unit="B", unit_scale=True, disable=None if dist.get_rank() == 0 else True)


class _Span(NamedTuple):
    """Addresses of a shard's untouched memory."""

    start: int
    end: int
    name: str
    shard: Shard


class _Weights:
    """Returns the values that belong to a view of a parameter's untouched memory."""

    def __init__(
        self,
        model: Sequence[torch.nn.Module],
        tensors: HfTensors,
        weight_map: WeightMap,
        dims: ModelDims,
        bar: tqdm,
    ) -> None:
        self._tensors, self._bar = tensors, bar
        self._weight_map, self._shape = weight_map, dims
        spans = []
        for name, shard in iter_global_parameters(model):
            start = shard.tensor.data_ptr()
            spans.append(_Span(start, start + shard.tensor.nbytes, name, shard))
        self._spans = sorted(spans)
        self._starts = [span.start for span in self._spans]
        self._last: tuple[str, Tensor] | None = None
        """The last matrix of gate and up: its two halves are requested one after the other."""

    def _find(self, address: int) -> _Span | None:
        index = bisect.bisect_right(self._starts, address) - 1
        return self._spans[index] if index >= 0 and address < self._spans[index].end else None

    @torch.no_grad()
    def read(self, view: Tensor) -> Tensor:
        """Return the values that belong to ``view``, in new memory; ``view`` itself if it is in no parameter."""
        span = self._find(view.data_ptr())
        if span is None:
            return view
        if self._last is None or self._last[0] != span.name:
            part = read_shard(span.name, span.shard, self._tensors, self._weight_map, self._shape)
            self._last = span.name, part.to(view.dtype).contiguous()
        whole = self._last[1]
        offset = whole.storage_offset() + (view.data_ptr() - span.start) // view.element_size()
        self._bar.update(view.nbytes)
        part = whole.as_strided(view.shape, view.stride(), offset)
        storage = whole.untyped_storage()
        if storage.resizable() and storage.nbytes() == part.nbytes:
            self._last = None
            return part
        return part.clone()  # of a half, of a rank's rows, or of a part of the mapped file

    def in_reading_order(self, shards: Shards) -> Shards:
        """Sort the entries of experts that are stacked in one parameter by expert number."""
        parted = {
            key: sorted((p for e in entries for p in self._parts(e)), key=_order) for key, entries in shards.items()
        }
        tensors = (entry.data for entries in parted.values() for entry in entries if isinstance(entry, ShardedTensor))
        self._bar.total = sum(tensor.nbytes for tensor in tensors)
        return parted

    def _parts(self, entry: Any) -> list[Any]:
        span = self._find(entry.data.data_ptr()) if isinstance(entry, ShardedTensor) else None
        if span is None or not span.shard.is_stacked:
            return [entry]
        axis = entry.prepend_axis_num
        offset, shape, fragments = list(entry.global_offset), entry.local_shape, list(entry.axis_fragmentations)
        fragments[axis] = entry.global_shape[axis]
        parts = []
        for index in range(shape[0]):
            at = (*offset[:axis], offset[axis] + index, *offset[axis + 1 :])
            parts.append(
                replace(
                    entry,
                    data=entry.data[index : index + 1],
                    local_shape=(1, *shape[1:]),
                    global_offset=at,
                    axis_fragmentations=tuple(fragments),
                )
            )
        return parts


def _order(entry: Any) -> tuple[int, ...]:
    return tuple(entry.global_offset) if isinstance(entry, ShardedTensor) else ()


class _Planner(HostPlanner):
    """Requests each tensor when it is about to be written."""

    def __init__(self, weights: _Weights) -> None:
        super().__init__()
        self._weights = weights

    def on_host(self, value: Tensor) -> Tensor:
        """Return the values that belong to the untouched memory."""
        return self._weights.read(value)
