"""What a conversion is going to write, known to the byte before it starts: shards, headers, index, size.

A ``Rewrite`` says what becomes of each tensor; everything else here and in ``run.py`` is the same for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from slime.utils.errors import ConfigError, DataError
from slime.weights.hf_rewrite.source import HfSource
from slime.weights.hf_rewrite.tensor_file import SourceTensor, TensorInfo, make_header

OutputRows = tuple[str, int, Tensor]
"""Name of a tensor of the result, the row from which on it is given, and these rows."""


class RowReader(Protocol):
    """The reader through which a step reads the source; tensors come on the worker's device."""

    def read(self, stored: SourceTensor, first: int = 0, count: int | None = None) -> Tensor:
        """Some rows of a tensor, all by default."""
        ...

    def chunks(self, stored: SourceTensor, multiple: int = 1) -> Iterator[tuple[int, Tensor]]:
        """Yield a tensor in runs of rows that fit the worker's memory, all but the last a multiple of so many."""
        ...


@dataclass(frozen=True, slots=True)
class Step:
    """The conversion of one source tensor; its outputs go to the shard that replaces the source's shard."""

    source: SourceTensor
    outputs: tuple[TensorInfo, ...]
    """None: the tensor is dropped."""
    convert: Callable[[RowReader], Iterator[OutputRows]] | None = None
    """Makes the outputs; None where the bytes are copied."""


def copied(stored: SourceTensor) -> Step:
    """Return a step that copies the tensor as it is."""
    return Step(stored, (stored.info,))


def dropped(stored: SourceTensor) -> Step:
    """Return a step that leaves the tensor out of the result."""
    return Step(stored, ())


class Rewrite(Protocol):
    """One kind of conversion."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """Settings that distinguish two conversions of the same source; JSON."""
        ...

    def check(self, source: HfSource) -> None:
        """Refuse a source, before anything is written.

        Raises:
            SlimeError: saying what does not fit.
        """
        ...

    def step(self, source: HfSource, stored: SourceTensor) -> Step:
        """Return the conversion of one tensor."""
        ...

    def config(self, source: HfSource) -> dict[str, Any]:
        """Return the config.json of the result."""
        ...


@dataclass(frozen=True)
class FilePlan:
    """One file of the result."""

    name: str
    source: str
    """The file of the source that it is made from."""
    header: bytes
    offsets: dict[str, int]
    """Tensor to the place of its first byte in the file."""
    steps: tuple[Step, ...]
    outputs: dict[str, TensorInfo]

    @property
    def data_bytes(self) -> int:
        """Bytes of the tensors."""
        return sum(info.num_bytes for info in self.outputs.values())

    @property
    def file_bytes(self) -> int:
        """Bytes of the file."""
        return len(self.header) + self.data_bytes

    @property
    def source_bytes(self) -> int:
        """Bytes that are read for it."""
        return sum(step.source.info.num_bytes for step in self.steps)


def make_plan(rewrite: Rewrite, source: HfSource) -> list[FilePlan]:
    """Plan the shards of the result, one for each shard of the source of which anything is left.

    Raises:
        DataError: two tensors of the source become tensors of the same name.
        ConfigError: nothing is left.
    """
    kept: list[tuple[str, list[Step]]] = []
    owners: dict[str, str] = {}
    for file, tensors in source.shards.items():
        steps = [rewrite.step(source, stored) for stored in tensors]
        for step in steps:
            for info in step.outputs:
                other = owners.setdefault(info.name, step.source.info.name)
                if other != step.source.info.name:
                    raise DataError(f"{info.name} would be made of {other} and of {step.source.info.name}")
        if any(step.outputs for step in steps):
            kept.append((file, steps))
    if not kept:
        raise ConfigError(f"there would be no tensor in the result: {source.folder} holds none that is kept")
    plans = []
    for number, (file, steps) in enumerate(kept, 1):
        outputs = {info.name: info for step in steps for info in step.outputs}
        header, offsets = make_header(outputs.values())
        name = f"model-{number:05d}-of-{len(kept):05d}.safetensors"
        plans.append(FilePlan(name, file, header, offsets, tuple(steps), outputs))
    return plans


def make_index(plans: list[FilePlan]) -> dict[str, Any]:
    """``model.safetensors.index.json`` of the result; its total size is that of the tensors' bytes."""
    return {
        "metadata": {"total_size": sum(plan.data_bytes for plan in plans)},
        "weight_map": dict(sorted((name, plan.name) for plan in plans for name in plan.outputs)),
    }
