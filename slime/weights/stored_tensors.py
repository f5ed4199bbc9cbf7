"""Places of the tensors of a safetensors folder: file, first byte, length.

The format: eight bytes with the length of a JSON header, little endian; the header; then the tensors' bytes, at the
offsets that the header names.  Reading the headers alone is enough to map or to copy a tensor without decoding it.
"""

from __future__ import annotations

import json
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slime.utils.errors import DataError
from slime.weights.delta import Bytes
from slime.weights.hf_files import INDEX_FILE

SUFFIX = ".safetensors"
MAX_HEADER_BYTES = 100 * 1024**2
"""The format's own limit."""
STORED_DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
"""Names of torch's dtypes in the format."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a file."""

    file: Path
    begin: int
    """First byte, counted from the start of the file."""
    num_bytes: int
    dtype: str
    """As the format spells it."""
    shape: tuple[int, ...]


def read_header(path: Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Return the tensors by name, and the file's metadata.

    Raises:
        DataError: the file is cut off, or is no safetensors file.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= MAX_HEADER_BYTES:
                raise ValueError(f"its header claims {length} bytes")
            header: dict[str, Any] = json.loads(file.read(length))
        size = path.stat().st_size
        metadata = header.pop("__metadata__", {})
        tensors = {}
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            if not 0 <= begin <= end <= size - 8 - length:
                raise ValueError(f"{name} ends at byte {8 + length + end}, and the file has {size}")
            tensors[name] = StoredTensor(path, 8 + length + begin, end - begin, entry["dtype"], tuple(entry["shape"]))
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing, though the index of its folder names it") from error
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is no whole safetensors file: {error}") from error
    return tensors, metadata


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a model: those its index names, or all when it has none.

    Raises:
        DataError: the index cannot be read, or names a file elsewhere.
    """
    index = folder / INDEX_FILE
    if not index.exists():
        return sorted(folder.glob(f"*{SUFFIX}"))
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{index} is no index of safetensors files: {error!r}") from error
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise DataError(f"{index} names {outside[0]!r}, which is not a file beside it")
    return [folder / name for name in names]


def read_layout(folder: str | Path) -> dict[str, StoredTensor]:
    """Return all tensors of a model folder by name.

    Raises:
        DataError: there are none, one is stored twice, or a file is damaged.
    """
    layout: dict[str, StoredTensor] = {}
    for path in weight_files(Path(folder)):
        for name, stored in read_header(path)[0].items():
            if name in layout:
                raise DataError(f"{name} is stored twice, in {layout[name].file} and in {path}")
            layout[name] = stored
    if not layout:
        raise DataError(f"{folder} holds no safetensors files; weights that travel over disk need them")
    return layout


def read_bytes(stored: StoredTensor) -> Bytes:
    """Return a copy of the tensor's bytes."""
    data = np.fromfile(stored.file, np.uint8, stored.num_bytes, offset=stored.begin)
    if data.size != stored.num_bytes:
        raise DataError(f"{stored.file} ended {stored.num_bytes - data.size} bytes early")
    return data


class MappedFile:
    """A whole file as an array in memory; a context manager.

    With ``is_writable``, what is written to the array is written to the file, and is on disk when the context ends
    without an error.
    """

    def __init__(self, path: Path, *, is_writable: bool = False) -> None:
        self._file = path.open("r+b" if is_writable else "rb")
        access = mmap.ACCESS_WRITE if is_writable else mmap.ACCESS_READ
        try:
            self._map = mmap.mmap(self._file.fileno(), 0, access=access)
        except BaseException:
            self._file.close()
            raise
        self._is_writable = is_writable
        self.bytes: Bytes = np.frombuffer(self._map, np.uint8)

    def part(self, stored: StoredTensor) -> Bytes:
        """Return the bytes of one tensor of this file."""
        return self.bytes[stored.begin : stored.begin + stored.num_bytes]

    def __enter__(self) -> MappedFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None and self._is_writable:
            self._map.flush()
        # Arrays may still refer to the map, so that it cannot be closed here; it goes with the last of them.
        self.bytes = np.empty(0, np.uint8)
        self._file.close()
