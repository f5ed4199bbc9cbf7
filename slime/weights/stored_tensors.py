"""Locations of the tensors in a safetensors folder: file, first byte, length.

Format: eight little-endian bytes with the length of a JSON header; the header; then the tensors' bytes, at the offsets
given in the header.  The headers alone are enough to map or copy a tensor without decoding it.
"""

from __future__ import annotations

import functools
import math
import mmap
import os
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from slime.utils.errors import DataError
from slime.utils.files import COPY_AGAIN, opened, parse_object, read_outside_file

Bytes = NDArray[np.uint8]
"""Contiguous bytes of shape ``[num_bytes]``."""
SUFFIX = ".safetensors"
_COUNTED = re.compile(r"-\d+(-of-\d+)\.safetensors$")
"""Matches the name of a numbered shard: ``model-00002-of-00005.safetensors``."""
INDEX_FILE = "model.safetensors.index.json"
LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100 * 1024**2
"""Limit set by the format."""
STORED_DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
"""torch dtype name -> safetensors dtype code."""
OTHER_DTYPES = frozenset("U16 U32 U64 C64 F4 F6_E2M3 F6_E3M2 F8_E4M3FNUZ F8_E5M2FNUZ".split())
"""safetensors dtype codes that are accepted in files but not supported in computation."""
TORCH_DTYPES = {code: getattr(torch, name) for name, code in STORED_DTYPES.items()}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """The header entry of one tensor."""

    name: str
    dtype: str
    """safetensors dtype code, such as ``BF16`` or ``F8_E4M3``."""
    shape: tuple[int, ...]
    num_bytes: int

    @classmethod
    def of(cls, name: str, dtype: torch.dtype, shape: Iterable[int]) -> TensorInfo:
        """Describe a tensor to be written."""
        sizes = tuple(shape)
        code = STORED_DTYPES[str(dtype).removeprefix("torch.")]
        return TensorInfo(name, code, sizes, math.prod(sizes) * dtype.itemsize)

    @property
    def rows(self) -> int:
        """Size of the first dimension; 1 for a scalar."""
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        """Bytes per index of the first dimension."""
        return self.num_bytes // self.rows if self.rows else 0


@dataclass(frozen=True, slots=True)
class StoredTensor(TensorInfo):
    """A tensor in a file."""

    file: Path
    begin: int
    """First byte, counted from the start of the file."""


def save_tensors(path: Path, tensors: dict[str, torch.Tensor], notes: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file with the permissions of the umask; the library's own files are private to the user."""
    path.touch()
    mode = path.stat().st_mode
    save_file(tensors, path, metadata={"format": "pt", **(notes or {})})
    path.chmod(mode)


def read_header(path: Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Return name -> tensor, in file order, and the file's metadata.

    Raises:
        DataError: the file is missing, is not a safetensors file, or is shorter or longer than its header says.
    """
    try:
        with opened(path) as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            if not 2 <= length <= min(MAX_HEADER_BYTES, size - LENGTH_BYTES):
                raise ValueError(f"its header claims {length} bytes, and it has {size}")
            header = parse_object(file.read(length))
        metadata = dict(header.pop("__metadata__", {}))
        position = LENGTH_BYTES + length
        tensors = {}
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            begin, end = (LENGTH_BYTES + length + offset for offset in entry["data_offsets"])
            stored = StoredTensor(name, entry["dtype"], tuple(entry["shape"]), end - begin, path, begin)
            if any(type(size) is not int or size < 0 for size in (*stored.shape, begin, end)) or not name:
                raise ValueError(f"it gives {name!r} the shape {entry['shape']} at {entry['data_offsets']}")
            if stored.dtype not in TORCH_DTYPES and stored.dtype not in OTHER_DTYPES:
                raise ValueError(f"it gives {name} the dtype {stored.dtype!r}, which the format does not have")
            dtype = TORCH_DTYPES.get(stored.dtype)
            needed = stored.num_bytes if dtype is None else math.prod(stored.shape) * dtype.itemsize
            if begin != position or stored.num_bytes != needed or end < begin:
                raise ValueError(f"it gives {name} a wrong offset or size")
            tensors[name] = stored
            position = end
        if position != size:
            raise ValueError(f"it has {size} bytes, its header says {position}")
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing, though the index of its folder names it") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{path} is no whole safetensors file: {str(error)[:300]}; copy it again") from error
    return tensors, metadata


def read_index(index: Path) -> dict[str, str]:
    """Return tensor name -> file name from a folder's index.

    Raises:
        DataError: the index cannot be read or is malformed.
    """
    try:
        weight_map = parse_object(read_outside_file(index)).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ValueError("it has no weight_map")
        for name in weight_map.values():
            if not isinstance(name, str) or Path(name).name != name or name in ("", ".."):
                raise ValueError(f"it names {str(name)[:80]!r}, which is no file beside it")
    except ValueError as error:
        raise DataError(f"{index} is no index of safetensors files: {error}. {COPY_AGAIN}") from error
    return weight_map


def weight_files(folder: Path) -> list[Path]:
    """Return a model's safetensors files: those named by its index, or all if it has no index.

    Raises:
        DataError: the index cannot be read, or names a file in another folder.
    """
    index = folder / INDEX_FILE
    if not index.exists():
        return sorted(folder.glob(f"*{SUFFIX}"))
    return [folder / name for name in sorted(set(read_index(index).values()))]


def read_layout(folder: str | Path) -> dict[str, StoredTensor]:
    """Return name -> tensor for a whole model folder.

    Raises:
        DataError: the folder has no tensors, one is stored twice, a file is damaged, or the index does not match.
    """
    layout: dict[str, StoredTensor] = {}
    for path in weight_files(Path(folder)):
        for name, stored in read_header(path)[0].items():
            if name in layout:
                raise DataError(f"{name} is stored twice, in {layout[name].file} and in {path}")
            layout[name] = stored
    _check_index(Path(folder), layout)
    if not layout:
        raise DataError(f"{folder} holds no safetensors files; weights that travel over disk need them")
    return layout


@functools.lru_cache(maxsize=4)
def stored_codes(folder: str) -> Mapping[str, str]:
    """Return tensor name -> safetensors dtype code for a model folder.

    Raises:
        DataError: see :func:`read_layout`.
    """
    return {name: entry.dtype for name, entry in read_layout(folder).items()}


def _check_index(folder: Path, layout: Mapping[str, StoredTensor]) -> None:
    """Check a folder's index, if any, against the contents of its files and the shard numbers in their names."""
    index = folder / INDEX_FILE
    if not index.exists():
        return
    weight_map = read_index(index)
    for name, file in sorted(weight_map.items()):
        if name not in layout or layout[name].file.name != file:
            there = f"it is in {layout[name].file.name}" if name in layout else "no file has it"
            raise DataError(f"{index} puts {name} into {file}, and {there}; download the folder again")
    for name in sorted(layout.keys() - weight_map.keys()):
        raise DataError(f"{index} leaves out {name}, which {layout[name].file} has; download the folder again")
    check_parts(index, set(weight_map.values()))


def check_parts(index: Path, files: Collection[str]) -> None:
    """Check that the index omits no shard of its model; files with other shard counts may belong to another model."""
    counted = {match[1] for file in files if (match := _COUNTED.search(file))}
    for path in sorted(index.parent.glob(f"*{SUFFIX}")):
        if path.name not in files and (match := _COUNTED.search(path.name)) and match[1] in counted:
            raise DataError(f"{index} leaves out {path.name}, a part of the same model; download the folder again")


def read_bytes(stored: StoredTensor) -> Bytes:
    """Return a copy of the tensor's bytes."""
    data = np.fromfile(stored.file, np.uint8, stored.num_bytes, offset=stored.begin)
    if data.size != stored.num_bytes:
        raise DataError(f"{stored.file} ended {stored.num_bytes - data.size} bytes early")
    return data


class MappedFile:
    """A whole file mapped as a byte array; a context manager.

    With ``is_writable``, writes to the array change the file, and are on disk once the context ends without an error.
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
        # Arrays may still refer to the map, so it cannot be closed here; it is unmapped with the last of them.
        self.bytes = np.empty(0, np.uint8)
        self._file.close()
