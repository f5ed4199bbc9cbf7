"""The trainer's side of the fault tests: real pushes from gloo ranks, over a few small tensors."""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slime.backends.megatron_utils import cpu_platform  # noqa: F401

# isort: split
from megatron.core import mpu

from slime.backends.megatron_utils.update_weight.updater import WeightUpdater
from slime.ext.fast_push.acknowledgements import DigestedBuckets
from slime.ext.fast_push.verified_push import VerifiedPush
from slime.utils.distributed_utils import init_gloo_group
from slime.utils.errors import WeightSyncError
from slime.ext.fast_push.carrier import NO_BUCKET
from slime.weights.digest import combine, digest_tensor
from slime.ext.fast_push.manifest import BucketEntry, BucketSlice, Manifest, TensorEntry, pack_whole
from slime.weights.push.state import Push, TrainerRanks
from tests.ext.fast_push.dist.fault_engine import FaultyEngine, start_engine

SHAPES = {
    "a.weight": (6, 8),
    "b.weight": (4, 8),
    "c.bias": (5,),
    "d.weight": (8, 8),
    "e.weight": (3,),
    "f.weight": (7, 2),
}
BUCKETS = (("a.weight", "b.weight"), ("c.bias", "d.weight"), ("e.weight",), ("f.weight",))
"""The first two belong to the first rank or pipeline stage, the others to the second."""


def values(version: int) -> dict[str, Tensor]:
    """The weights of a version."""
    generator = torch.Generator().manual_seed(version)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def digest_of(version: int) -> int:
    """What an engine's GPU that holds a version reports."""
    return combine(digest_tensor(tensor) for _, tensor in sorted(values(version).items()))


class FixedBuckets:
    """Buckets with the weights of the updater's version; each rank has its own, or all ranks have all.

    Args:
        updater: its version is used.
        owned: the buckets of each rank; a rank with fewer has empty steps at the end.
    """

    def __init__(self, updater: Any, owned: Sequence[Sequence[int]]) -> None:
        self._updater = updater
        entries: list[TensorEntry] = []
        buckets: list[BucketEntry] = []
        for names in BUCKETS:
            tensors, bucket = pack_whole((name, SHAPES[name], torch.float32) for name in names)
            entries += tensors
            buckets.append(bucket)
        self.manifest = Manifest(tuple(entries), tuple(buckets))
        self._own = owned[dist.get_rank()]
        self._num_steps = max(map(len, owned))

    def iter_buckets(self, *, with_constants: bool = True) -> Iterator[tuple[int, Tensor]]:
        """As the protocol requires."""
        weights = values(self._updater.version)
        for step in range(self._num_steps):
            if step >= len(self._own):
                yield NO_BUCKET, torch.empty(0, dtype=torch.uint8)
                continue
            index = self._own[step]
            bucket = self.manifest.buckets[index]
            flat = torch.zeros(bucket.num_bytes, dtype=torch.uint8)
            for piece in bucket.slices:
                self._lay(flat, piece, weights[piece.name])
            yield index, flat

    @staticmethod
    def _lay(flat: Tensor, piece: BucketSlice, tensor: Tensor) -> None:
        data = tensor.contiguous().view(-1).view(torch.uint8)
        flat[piece.offset : piece.offset + data.numel()] = data


ALL, OWN, STAGES = ((0, 1, 2, 3),) * 2, ((0, 1, 2), (3,)), ((0, 1), (2, 3))
"""Every rank has every bucket; each has separate buckets, of unequal number; two pipeline stages."""


class FixedPush(VerifiedPush):
    """Pushes buckets that do not come from a model."""

    fixed: Any

    @property
    def buckets(self) -> Any:
        return self.fixed


class FixedUpdater(WeightUpdater):
    """Pushes fixed buckets.

    Args:
        owned: the buckets of each rank.
    """

    def __init__(self, *arguments: Any, owned: Sequence[Sequence[int]], **keywords: Any) -> None:
        super().__init__(*arguments, make_transport=self._make, **keywords)
        self._owned = owned

    def _make(self, args: Namespace, ranks: TrainerRanks) -> FixedPush:
        made = FixedPush.of(args, ranks)
        made.fixed = DigestedBuckets(FixedBuckets(self, self._owned))
        return made

    def _weights_in(self, dtype: torch.dtype) -> Any:
        return Namespace(dtype=dtype)

    def _estimate_cast_loss(self, push: Push) -> None:
        pass


@dataclass(frozen=True)
class Mode:
    """Placement of the engines relative to the two trainer ranks."""

    colocate: bool
    owned: Sequence[Sequence[int]]
    engines: tuple[tuple[int, int], ...]
    """First GPU and number of GPUs of each engine; trainer ranks have GPUs 0 and 1."""


MODES = {
    "colocated": Mode(True, ALL, ((0, 1), (1, 1))),
    "colocated, own buckets": Mode(True, OWN, ((0, 1), (1, 1))),
    "distributed": Mode(False, STAGES, ((2, 1), (3, 1))),
    "mixed": Mode(True, ALL, ((0, 2), (2, 2), (4, 1))),
}


@dataclass(frozen=True)
class Case:
    """One push with one fault."""

    mode: str
    fault: str
    victim: int
    timeout_s: float = 20.0

    @property
    def name(self) -> str:
        return f"{self.mode}: engine {self.victim} {self.fault}"


@dataclass
class Outcome:
    """The result of a push."""

    old: int
    new: int
    excluded: dict[int, str] = field(default_factory=dict)
    error: str = ""
    num_attempts: int = 0
    states: list[dict[str, Any] | None] = field(default_factory=list)


def push_all(hall: str, cases: Sequence[Case]) -> list[Outcome]:
    """Every case in turn, on both ranks; returns the outcomes on rank 0."""
    logging.disable(logging.CRITICAL)
    mpu.initialize_model_parallel(pipeline_model_parallel_size=2)
    init_gloo_group()
    updaters: dict[str, Any] = {}
    return [push_one(hall, case, updaters) for case in cases]


def push_one(hall: str, case: Case, updaters: dict[str, Any]) -> Outcome:
    """One push to fresh engines, one of which has the fault."""
    mode = MODES[case.mode]
    if case.mode not in updaters:
        args = Namespace(
            check_weight_update_equal=False,
            actor_num_gpus_per_node=2,
            colocate=mode.colocate,
            update_weight_mode="full",
            update_weight_transport="nccl",
            params_dtype=torch.float32,
        )
        updaters[case.mode] = FixedUpdater(args, [], lambda: None, hf_config={}, first_version=1, owned=mode.owned)
    updater = updaters[case.mode]
    updater.args.weight_update_timeout_s = case.timeout_s
    old = updater.version
    addresses: list[Any] = [None]
    if dist.get_rank() == 0:
        addresses = [
            [
                start_engine(
                    hall,
                    values(old),
                    num_gpus=count,
                    version=str(old),
                    fault=case.fault if index == case.victim else "",
                )
                for index, (_, count) in enumerate(mode.engines)
            ]
        ]
    dist.broadcast_object_list(addresses, src=0)
    engines = [
        FaultyEngine(address, index=index, num_gpus=count, gpu_offset=offset, is_colocated=offset + count <= 2)
        for index, (address, (offset, count)) in enumerate(zip(addresses[0], mode.engines, strict=True))
    ]
    updater.connect(engines, 1)
    outcome = Outcome(old, old + 1)
    try:
        report = updater.push()
        outcome.num_attempts = report.num_attempts
    except WeightSyncError as error:
        outcome.error = str(error)
    outcome.excluded = {engine.index: engine.reason for engine in updater.excluded}
    outcome.states = [engine.state() for engine in engines]
    dist.barrier()
    for engine in engines:
        engine.close()
    return outcome
