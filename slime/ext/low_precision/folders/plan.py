"""A conversion before it starts: the model folder it reads, checked, and its output, known to the byte.

A ``Rewrite`` says what becomes of each tensor; everything else here and in ``run.py`` is the same for all of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from slime.ext.low_precision.folders.tensor_file import RowReader, make_header
from slime.utils.errors import ConfigError, DataError
from slime.utils.files import read_model_config
from slime.weights.hf_files import INDEX_FILE, QUANTIZATION_KEYS
from slime.weights.stored_tensors import StoredTensor, TensorInfo, check_parts, read_header, read_index

logger = logging.getLogger(__name__)

CONFIG_FILE = "config.json"
NAMES_SHOWN = 3

OutputRows = tuple[str, int, Tensor]
"""Name of a tensor of the result, the row from which on it is given, and these rows."""


@dataclass(frozen=True)
class HfSource:
    """A complete, undamaged folder.

    Invariant: every tensor that the index names is in ``tensors``, and every file has the size its header says.
    """

    folder: Path
    config: dict[str, Any]
    shards: dict[str, list[StoredTensor]]
    """File name to its tensors, in the order of their bytes."""
    tensors: dict[str, StoredTensor]

    @property
    def quantization_config(self) -> dict[str, Any] | None:
        """The quantization entry of config.json, at its top or in the text part of a multimodal model."""
        for part in (self.config, self.config.get("text_config") or {}):
            for key in QUANTIZATION_KEYS:
                if part.get(key):
                    return dict(part[key])
        return None

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(stored.num_bytes for stored in self.tensors.values())


def open_source(folder: str | Path) -> HfSource:
    """Read config, index and the headers of all shards.

    Raises:
        ConfigError: the folder, its config.json or its safetensors are not there.
        DataError: shards or tensors that the index names are missing, or a file is damaged.
    """
    path = Path(folder)
    if not path.is_dir():
        raise ConfigError(f"{folder} is no folder; give a local model folder, for example one that hf download made")
    config = read_model_config(path, flag="", error=DataError)
    index = path / INDEX_FILE
    weight_map: dict[str, str] | None = None
    if index.is_file():
        weight_map = read_index(index)
        if not weight_map:
            raise DataError(f"{index} has no weight_map; copy the index again")
        files = sorted(set(weight_map.values()))
        absent = [name for name in files if not (path / name).is_file()]
        if absent:
            raise DataError(
                f"{len(absent)} of {len(files)} shards that {INDEX_FILE} names are not in {path}: {shown(absent)}; "
                "finish the download"
            )
        check_parts(index, files)
        if others := sorted(file.name for file in path.glob("*.safetensors") if file.name not in set(files)):
            logger.warning("%s are not in %s and are left out", shown(others), index)
    else:
        files = sorted(file.name for file in path.glob("*.safetensors"))
        if not files:
            raise ConfigError(f"{path} has no *.safetensors; convert the checkpoint to safetensors first")
    headers = {name: read_header(path / name)[0] for name in files}
    if weight_map is not None:
        lost = [name for name, file in weight_map.items() if name not in headers[file]]
        if lost:
            raise DataError(
                f"{INDEX_FILE} of {path} names {len(lost)} tensors that are not in their shards: {shown(lost)}; "
                "the index is of another checkpoint"
            )
    shards: dict[str, list[StoredTensor]] = {name: [] for name in files}
    tensors: dict[str, StoredTensor] = {}
    for file, header in headers.items():
        for name, stored in header.items():
            if weight_map is not None and weight_map.get(name, file) != file:
                continue  # the index says which of two copies counts
            if name in tensors:
                raise DataError(f"{name} is in {tensors[name].file.name} and in {file} of {path}; remove one of them")
            tensors[name] = stored
            shards[file].append(stored)
    return HfSource(path, config, shards, tensors)


def shown(names: list[str]) -> str:
    """Join a few names, and the number of the others, for a message."""
    rest = len(names) - NAMES_SHOWN
    return ", ".join(names[:NAMES_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


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
    """Return ``model.safetensors.index.json`` of the result; its total size counts the tensors' bytes."""
    return {
        "metadata": {"total_size": sum(plan.data_bytes for plan in plans)},
        "weight_map": dict(sorted((name, plan.name) for plan in plans for name in plan.outputs)),
    }
