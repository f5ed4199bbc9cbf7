"""The output of a conversion, known to the byte before it starts: shards, headers, index, size.

A ``Rewrite`` says what becomes of each tensor; everything else here and in ``run.py`` is the same for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from slime.utils.errors import ConfigError, DataError
from slime.weights.hf_rewrite.source import HfSource
from slime.weights.hf_rewrite.tensor_file import RowReader, make_header
from slime.weights.stored_tensors import StoredTensor, TensorInfo

OutputRows = tuple[str, int, Tensor]
"""Name of a tensor of the result, the row from which on it is given, and these rows."""


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """The conversion of one source tensor; its outputs go to the shard that replaces the source's shard."""

    source: StoredTensor
    outputs: tuple[TensorInfo, ...]
    """None: the tensor is dropped."""
    convert: Callable[[RowReader], Iterator[OutputRows]] | None = None
    """Makes the outputs; None where the bytes are copied."""


def copied(stored: StoredTensor) -> TensorPlan:
    """Return a plan that copies the tensor as it is."""
    return TensorPlan(stored, (stored,))


def dropped(stored: StoredTensor) -> TensorPlan:
    """Return a plan that leaves the tensor out of the result."""
    return TensorPlan(stored, ())


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

    def plan_tensor(self, source: HfSource, stored: StoredTensor) -> TensorPlan:
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
    tensors: tuple[TensorPlan, ...]
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
        return sum(tensor.source.num_bytes for tensor in self.tensors)


def make_plan(rewrite: Rewrite, source: HfSource) -> list[FilePlan]:
    """Plan the shards of the result, one for each shard of the source of which anything is left.

    Raises:
        DataError: two tensors of the source become tensors of the same name.
        ConfigError: nothing is left.
    """
    kept: list[tuple[str, list[TensorPlan]]] = []
    owners: dict[str, str] = {}
    for file, tensors in source.shards.items():
        planned = [rewrite.plan_tensor(source, stored) for stored in tensors]
        for tensor in planned:
            for info in tensor.outputs:
                other = owners.setdefault(info.name, tensor.source.name)
                if other != tensor.source.name:
                    raise DataError(f"{info.name} would be made of {other} and of {tensor.source.name}")
        if any(tensor.outputs for tensor in planned):
            kept.append((file, planned))
    if not kept:
        raise ConfigError(f"there would be no tensor in the result: {source.folder} holds none that is kept")
    plans = []
    for number, (file, planned) in enumerate(kept, 1):
        outputs = {info.name: info for tensor in planned for info in tensor.outputs}
        header, offsets = make_header(outputs.values())
        name = f"model-{number:05d}-of-{len(kept):05d}.safetensors"
        plans.append(FilePlan(name, file, header, offsets, tuple(planned), outputs))
    return plans


def make_index(plans: list[FilePlan]) -> dict[str, Any]:
    """Return ``model.safetensors.index.json`` of the result; its total size is that of the tensors' bytes."""
    return {
        "metadata": {"total_size": sum(plan.data_bytes for plan in plans)},
        "weight_map": dict(sorted((name, plan.name) for plan in plans for name in plan.outputs)),
    }
