"""A model folder as input: its config and the file of every tensor, checked before anything is converted."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.utils.errors import ConfigError, DataError
from slime.utils.json_file import read_model_config
from slime.weights.hf_files import INDEX_FILE
from slime.weights.stored_tensors import StoredTensor, read_header, read_index

logger = logging.getLogger(__name__)

CONFIG_FILE = "config.json"
QUANTIZATION_KEYS = ("quantization_config", "compression_config")
NAMES_SHOWN = 3


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


def without_quantization(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config of the same model with plain weights."""
    plain = {key: value for key, value in config.items() if key not in QUANTIZATION_KEYS}
    if isinstance(plain.get("text_config"), dict):
        plain["text_config"] = without_quantization(plain["text_config"])
    return plain
