"""The flat buckets of a push, made the plain way: whole tensors are gathered.

A source says once, in its manifest, what it will send, and fills the buckets again for every push.  The plain way is
right for every model and layout, and the only one that engines without our loader understand; ``shard_buckets`` is
the fast one.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from megatron.core import mpu
from torch import Tensor

from slime.backends.megatron_utils.flags.model_dims import model_dims
from slime.backends.megatron_utils.models import find_weight_map
from slime.backends.megatron_utils.update_weight.gather import (
    HostWeights,
    StageHeaders,
    hf_headers,
    iter_hf_tensors,
)
from slime.utils.errors import WeightSyncError
from slime.weights.buckets import NO_BUCKET, iter_units, plan_buckets
from slime.weights.manifest import BucketEntry, BucketSlice, Manifest, TensorEntry
from slime.weights.named_tensors import Header, dtype_name
from slime.weights.quantize import Quantizer


@dataclass(frozen=True, kw_only=True, slots=True)
class SentWeights:
    """The weights of a push, and the form in which engines take them."""

    args: Namespace
    """Complete flags."""
    model: Sequence[torch.nn.Module]
    """This rank's chunks."""
    get_host_weights: Callable[[], HostWeights | None] = lambda: None
    """Gives host copies of the parameters to read instead of the live ones; None reads these."""
    model_name: str
    """Chooses the name converter."""
    dtype: torch.dtype
    """Of floating-point tensors that are not quantised."""
    quantizer: Quantizer | None = None
    """The quantizer of the tensors that engines hold quantized; None for none."""
    bucket_bytes: int
    """``--update-weight-buffer-size``: no bucket of several tensors is larger."""
    constants: frozenset[str] = frozenset()
    """:attr:`Shard.name` of parameters that no step changes, the same on all ranks; their buckets are constant."""

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return next(iter(self.model[0].parameters())).device


@dataclass(frozen=True)
class _Others:
    """The names in ``only`` (None: all) that are not in ``without``."""

    only: Container[str] | None
    without: frozenset[str]

    def __contains__(self, name: object) -> bool:
        return name not in self.without and (self.only is None or name in self.only)


@dataclass(frozen=True)
class _Walk:
    """A walk over some of the parameters, whose tensors have their own buckets."""

    only: Container[str] | None
    turn: range
    """Buckets of this rank's stage."""
    names: frozenset[str]
    """HF tensors of this rank's stage."""
    is_constant: bool


class GatheredBuckets:
    """Whole tensors, gathered, converted and quantised one after the other, then laid into flat buffers.

    With ``across_stages`` every rank has every bucket; otherwise the ranks of each pipeline stage have that stage's.
    The constant ones come last.

    Args:
        weights: what to send; a tensor larger than ``bucket_bytes`` gets its own bucket.
        across_stages: all ranks get the tensors of all pipeline stages.
        only: names of the parameters to send (``Shard.name``), the same on all ranks; None for all.
    """

    def __init__(self, weights: SentWeights, *, across_stages: bool, only: Container[str] | None = None) -> None:
        self._weights, self._quantizer = weights, weights.quantizer
        self._across_stages = across_stages
        weight_map, shape = find_weight_map(weights.model_name), model_dims(weights.args)
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
            stages = hf_headers(
                weights.args, weights.model, model_name=weights.model_name, dtype=weights.dtype, only=part
            )
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
        """Of the largest bucket of this rank."""
        self._buffer: Tensor | None = None

    @property
    def manifest(self) -> Manifest:
        """As the protocol says."""
        return self._manifest

    def _planned(self, headers: StageHeaders) -> Iterator[list[Header]]:
        """Yield the tensors in the form they are sent in, in groups that stay in one bucket."""
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
        """Yield index and bytes of buckets; collective over the stage, or with ``across_stages`` over all ranks.

        Args:
            buffer: memory of at least :attr:`buffer_bytes` for all of them; by default its own, which stays.
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
        """Yield name and value of the tensors of a walk, in the order of the plan."""
        weights = self._weights
        converted = iter_hf_tensors(
            weights.args,
            weights.model,
            model_name=weights.model_name,
            dtype=weights.dtype,
            host_weights=weights.get_host_weights(),
            across_stages=self._across_stages,
            only=walk.only,
        )
        wanted = ((name, tensor) for name, tensor in converted if name in walk.names)
        for unit in iter_units(wanted, self._together):
            for name, tensor in unit:
                if self._quantizer is None or not self._quantizer.is_quantized(name):
                    yield name, tensor
                else:
                    yield from self._quantizer.quantize(name, tensor)

    def _check_full(self, index: int, missing: dict[str, BucketSlice]) -> None:
        if missing:
            raise WeightSyncError(
                f"bucket {index} shall hold {next(iter(missing))}, which is missing; the model's parameters have "
                "changed since its first push"
            )


def _lay(buffer: Tensor, part: BucketSlice | None, entry: TensorEntry | None, name: str, tensor: Tensor) -> None:
    """Copy a tensor to its place.

    Raises:
        WeightSyncError: the manifest has another tensor there.
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
