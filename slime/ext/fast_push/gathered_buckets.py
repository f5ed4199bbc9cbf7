"""Buckets of whole, gathered tensors; works for every model and layout.

``shard_buckets`` is faster.  A bucket source describes once, in its manifest, what it will send, and refills the
buckets for every push.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from megatron.core import mpu
from megatron.core.utils import unwrap_model
from torch import Tensor

from slime.backends.megatron_utils.parameters import iter_shards
from slime.backends.megatron_utils.update_weight.gather import (
    in_hf_names,
    names_on_all_ranks,
    sent_dtype,
    whole_shape,
)
from slime.backends.megatron_utils.update_weight.transport import SentWeights
from slime.ext.fast_push.carrier import NO_BUCKET
from slime.ext.fast_push.manifest import BucketEntry, BucketSlice, Manifest, TensorEntry, align, pack_whole
from slime.utils.distributed_utils import gather_objects
from slime.utils.errors import ConfigError, WeightSyncError
from slime.weights.buckets import iter_units
from slime.weights.named_tensors import Header, NamedTensors, dtype_name


@dataclass(frozen=True)
class _Others:
    """The names in ``only`` (None: all) that are not in ``without``."""

    only: Container[str] | None
    without: frozenset[str]

    def __contains__(self, name: object) -> bool:
        return name not in self.without and (self.only is None or name in self.only)


@dataclass(frozen=True)
class _Walk:
    """One pass over some of the parameters, whose tensors have separate buckets."""

    only: Container[str] | None
    turn: range
    """Indices of the buckets of this rank's stage."""
    names: frozenset[str]
    """HF names of the tensors of this rank's stage."""
    is_constant: bool


class GatheredBuckets:
    """Whole tensors, gathered, converted and quantized one at a time, then packed into flat buffers.

    With ``across_stages`` every rank has every bucket; otherwise the ranks of a pipeline stage have that stage's
    buckets.  Constant buckets come last.

    Args:
        weights: what to send; a tensor larger than ``bucket_bytes`` gets its own bucket.
        across_stages: True if all ranks get the tensors of all pipeline stages.
        only: names of the parameters to send (``Shard.name``), the same on all ranks; None for all.
    """

    def __init__(self, weights: SentWeights, *, across_stages: bool, only: Container[str] | None = None) -> None:
        self._weights, self._quantizer = weights, weights.quantizer
        self._across_stages = across_stages
        weight_map, shape = weights.form.weight_map, weights.form.dims
        present: set[str] = set()

        def together(name: str) -> tuple[str, ...]:
            names = weight_map.together_with(name, shape)
            return names if only is None else tuple(name for name in names if name in present)

        self._together = together
        tensors: list[TensorEntry] = []
        buckets: list[BucketEntry] = []
        self._walks: list[_Walk] = []
        chosen: list[Container[str] | None] = [only]
        if weights.constants:
            chosen = [_Others(only, weights.constants), weights.constants]
        for part in chosen:
            is_constant = part is weights.constants
            stages = hf_headers(weights, only=part)
            present |= {name for headers in stages for name, _, _ in headers}
            if across_stages:
                stages = [[header for headers in stages for header in headers]]
            for stage, headers in enumerate(stages):
                planned_tensors, planned_buckets = plan_buckets(self._planned(headers), weights.bucket_bytes)
                turn = range(len(buckets), len(buckets) + len(planned_buckets))
                if across_stages or stage == mpu.get_pipeline_model_parallel_rank():
                    self._walks.append(_Walk(part, turn, frozenset(name for name, _, _ in headers), is_constant))
                tensors += planned_tensors
                buckets += [replace(bucket, is_constant=is_constant) for bucket in planned_buckets]
        self._manifest = Manifest(tuple(tensors), tuple(buckets))
        own = [buckets[index].num_bytes for walk in self._walks for index in walk.turn]
        self.buffer_bytes = max(own, default=0)
        """Size of this rank's largest bucket."""
        self._buffer: Tensor | None = None

    @property
    def manifest(self) -> Manifest:
        """See ``BucketSource.manifest``."""
        return self._manifest

    def _planned(self, headers: list[Header]) -> Iterator[list[Header]]:
        """Yield headers of the tensors as sent, in groups that must share a bucket."""
        for unit in iter_units(((name, (name, shape, dtype)) for name, shape, dtype in headers), self._together):
            yield [output for _, header in unit for output in self._outputs(header)]

    def _outputs(self, header: Header) -> list[Header]:
        name, shape, _ = header
        if self._quantizer is None or not self._quantizer.is_quantized(name):
            return [header]
        return self._quantizer.outputs(name, shape)

    @torch.no_grad()
    def iter_buckets(
        self, buffer: Tensor | None = None, *, with_constants: bool = True
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield (index, flat buffer) of buckets; collective over the stage, or with ``across_stages`` over all ranks.

        Args:
            buffer: memory of at least :attr:`buffer_bytes` for all buckets; by default one that this object keeps.
            with_constants: whether to include the constant buckets.
        """
        if buffer is None:
            if self._buffer is None:
                self._buffer = torch.empty(self.buffer_bytes, dtype=torch.uint8, device=self._weights.device)
            buffer = self._buffer
        for walk in self._walks:
            if with_constants or not walk.is_constant:
                yield from self._iter_walk(walk, buffer)

    def _iter_walk(self, walk: _Walk, buffer: Tensor) -> Iterator[tuple[int, Tensor]]:
        indices = iter(walk.turn)
        index, entry, places, flat = NO_BUCKET, BucketEntry(0, ()), {}, None
        for name, tensor in self._tensors(walk):
            if name not in places:
                if flat is not None:
                    self._check_full(index, places)
                    yield index, flat
                index = next(indices)
                entry = self._manifest.buckets[index]
                places = {part.name: part for part in entry.slices}
                flat = buffer[: entry.num_bytes]
            assert flat is not None
            _lay(flat, places.pop(name, None), self._manifest.by_name.get(name), name, tensor)
        if flat is not None:
            self._check_full(index, places)
            yield index, flat

    def _tensors(self, walk: _Walk) -> Iterator[tuple[str, Tensor]]:
        """Yield name and value of a walk's tensors, in planned order."""
        whole = self._weights.whole_tensors(across_stages=self._across_stages, only=walk.only)
        wanted = ((name, tensor) for name, tensor in whole if name in walk.names)
        for unit in iter_units(wanted, self._together):
            for name, tensor in unit:
                yield from self._weights.as_sent(name, tensor)

    def _check_full(self, index: int, missing: dict[str, BucketSlice]) -> None:
        if missing:
            raise WeightSyncError(
                f"bucket {index} should hold {next(iter(missing))}, which is missing; the model's parameters have "
                "changed since its first push"
            )


def _lay(buffer: Tensor, part: BucketSlice | None, entry: TensorEntry | None, name: str, tensor: Tensor) -> None:
    """Copy a tensor to its place in the bucket.

    Raises:
        WeightSyncError: the manifest has a different tensor there.
    """
    if part is None or entry is None or (tuple(tensor.shape), dtype_name(tensor.dtype)) != (entry.shape, entry.dtype):
        planned = "nothing" if entry is None else f"{entry.dtype} {list(entry.shape)}"
        raise WeightSyncError(
            f"{name} came as {tensor.dtype} {list(tensor.shape)}, but the manifest of the push has {planned} in its "
            "place; the model's parameters have changed since its first push"
        )
    if tensor.numel():
        place = buffer[part.offset : part.offset + entry.num_bytes].view(tensor.dtype).view(tensor.shape)
        place.copy_(tensor)


def plan_buckets(
    units: Iterable[list[tuple[str, tuple[int, ...], torch.dtype]]], bucket_bytes: int
) -> tuple[list[TensorEntry], list[BucketEntry]]:
    """Pack whole tensors into flat buckets of at most ``bucket_bytes``; a larger unit gets its own bucket.

    Args:
        units: name, shape and dtype of tensors; a unit is never split over buckets.
        bucket_bytes: the limit; ``--update-weight-buffer-size``.

    Raises:
        ConfigError: the limit is not positive.
    """
    if bucket_bytes <= 0:
        raise ConfigError(f"--update-weight-buffer-size is {bucket_bytes}; it must be a positive number of bytes")
    tensors: list[TensorEntry] = []
    buckets: list[BucketEntry] = []
    held: list[tuple[str, tuple[int, ...], torch.dtype]] = []
    size = 0

    def close() -> None:
        entries, bucket = pack_whole(held)
        tensors.extend(entries)
        buckets.append(bucket)

    for unit in units:
        added = sum(align(math.prod(shape) * dtype.itemsize) for _, shape, dtype in unit)
        if held and size + added > bucket_bytes:
            close()
            held, size = [], 0
        held += unit
        size += added
    if held:
        close()
    return tensors, buckets


def hf_headers(weights: SentWeights, *, only: Container[str] | None = None) -> list[list[Header]]:
    """Return, for every pipeline stage, HF name, whole shape and dtype of its tensors; equal on all ranks.

    The order is that of ``SentWeights.whole_tensors``; no tensor is moved.  A tensor that several stages hold (a tied
    embedding) is listed by the first of them.  Collective over the pipeline.

    Raises:
        WeightSyncError: two parameters of a stage convert to the same HF name.
    """
    own = list(_megatron_headers(weights.model, weights.dtype, only))
    is_piped = mpu.get_pipeline_model_parallel_world_size() > 1
    stages = gather_objects(own, mpu.get_pipeline_model_parallel_group()) if is_piped else [own]
    result: list[list[Header]] = []
    sent: set[str] = set()
    for listed in stages:
        new = [header for header in listed if header[0] not in sent]
        sent |= {name for name, _, _ in new}
        shapes = ((name, torch.empty(shape, dtype=kind, device="meta")) for name, shape, kind in new)
        converted = in_hf_names(weights.form, shapes)
        result.append([(hf_name, tuple(tensor.shape), tensor.dtype) for hf_name, tensor in converted])
    return result


def _megatron_headers(
    model: Sequence[torch.nn.Module], dtype: torch.dtype | None, only: Container[str] | None
) -> Iterator[tuple[str, tuple[int, ...], torch.dtype]]:
    """Yield global name, whole shape and dtype of this stage's parameters, including those of all expert ranks."""
    num_experts = unwrap_model(model[0]).config.num_moe_experts
    seen: set[str] = set()
    for shard in iter_shards(model):
        if only is not None and shard.name not in only:
            continue
        for name in names_on_all_ranks(shard, num_experts):
            if name not in seen:  # chunks may share a parameter; the first counts
                seen.add(name)
                yield name, tuple(whole_shape(shard)), sent_dtype(shard, dtype)


def named_views(flat: Tensor, entry: BucketEntry, manifest: Manifest) -> NamedTensors:
    """Return a bucket's tensors as views of its buffer.

    Raises:
        WeightSyncError: the bucket holds only a slice of some tensor.
    """
    tensors: NamedTensors = []
    for part in entry.slices:
        whole = manifest.by_name[part.name]
        if part.slice.sizes != whole.shape:
            raise WeightSyncError(
                f"a bucket holds {list(part.slice.sizes)} of {part.name}, whose shape is {list(whole.shape)}; "
                "only slime's loader takes slices"
            )
        data = flat[part.offset : part.offset + whole.num_bytes]
        tensors.append((part.name, data.view(whole.torch_dtype).view(whole.shape)))
    return tensors
