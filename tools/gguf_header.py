"""Read a GGUF file's header: its keys, and the place of each tensor.

    GGUF | version | tensors | keys | key, type, value ... | tensor's name, sides, type, offset ... | data

Every count and length is compared with the bytes that are left before anything of that size is allocated.  The
``gguf`` package's own reader trusts them.
"""

from __future__ import annotations

import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from slime.utils.errors import ConfigError

MAGIC, VERSIONS = b"GGUF", (2, 3)
_SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
"""Type of a value -> its code in ``struct``."""
_TEXT, _ARRAY = 8, 9
_SMALLEST_KEY, _SMALLEST_TENSOR = 8 + 4 + 1, 8 + 4 + 8 + 4 + 8
MAX_ITEMS = 8 << 20
"""Limit for all lists together; the package's reader makes a Python object of each item."""
MAX_SIDES = 4
DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True, slots=True)
class ListInfo:
    """A list among the keys, which is left in the file."""

    is_text: bool
    count: int


@dataclass(frozen=True, slots=True)
class Header:
    """The keys of a file, and the shape of each tensor."""

    fields: dict[str, Any]
    """Numbers, texts and lists by key."""
    shapes: dict[str, tuple[int, ...]]
    """As in torch: the dimension that varies fastest comes last."""


def read_gguf_header(path: Path) -> Header:
    """Return the header of a file that contains all of its tensors.

    Raises:
        ConfigError: the file is missing, cut short, or contradicts itself.
    """
    if not path.is_file():
        raise ConfigError(f"--gguf {path} is no file")
    with path.open("rb") as file:
        try:
            return _Bounded(file).header()
        except (ValueError, OSError) as error:
            raise ConfigError(
                f"--gguf {path} is no GGUF file that can be read: {error}. Download it again."
            ) from error


class _Bounded:
    """A file that is never read beyond its end."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._size = os.fstat(file.fileno()).st_size
        self._left = self._size
        self._items_left = MAX_ITEMS

    def header(self) -> Header:
        """Read the header."""
        if self._bytes(4, "the magic") != MAGIC:
            raise ValueError(f"it does not begin with {MAGIC!r}")
        if (version := self._number("I", "the version")) not in VERSIONS:
            raise ValueError(f"it has the version {version}; {VERSIONS[0]} and {VERSIONS[1]} are read")
        num_tensors, num_keys = self._number("Q", "the number of tensors"), self._number("Q", "the number of keys")
        if num_keys * _SMALLEST_KEY + num_tensors * _SMALLEST_TENSOR > self._left:
            raise ValueError(f"it claims {num_keys} keys and {num_tensors} tensors in {self._size} bytes")
        fields: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._text("a key")
            if key in fields:
                raise ValueError(f"it has the key {key[:80]!r} twice")
            fields[key] = self._value(key, self._number("I", f"the type of {key[:80]}"))
        tensors: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(num_tensors):
            name = self._text("the name of a tensor")
            if name in tensors:
                raise ValueError(f"it has the tensor {name[:80]!r} twice")
            tensors[name] = self._tensor(name[:80])
        self._check_places(tensors, fields.get("general.alignment", DEFAULT_ALIGNMENT))
        return Header(fields, {name: shape for name, (shape, _, _) in tensors.items()})

    def _bytes(self, length: int, what: str) -> bytes:
        if length > self._left:
            raise ValueError(f"{what} has {length} bytes, and {self._left} are left")
        self._left -= length
        return self._file.read(length)

    def _number(self, code: str, what: str) -> Any:
        form = struct.Struct("<" + code)
        (value,) = form.unpack(self._bytes(form.size, what))
        return value

    def _text(self, what: str) -> str:
        data = self._bytes(self._number("Q", f"the length of {what}"), what)
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise ValueError(f"{what} is no UTF-8: {data[:80]!r}") from None

    def _value(self, key: str, kind: int) -> Any:
        key = key[:80]
        if kind == _TEXT:
            return self._text(key)
        if kind == _ARRAY:
            return self._list(key)
        if kind not in _SCALARS:
            raise ValueError(f"{key} has the type {kind}, which the format does not have")
        return self._number(_SCALARS[kind], key)

    def _list(self, key: str) -> ListInfo:
        kind, count = self._number("I", f"the type of {key}"), self._number("Q", f"the length of {key}")
        if kind not in _SCALARS and kind != _TEXT:
            raise ValueError(f"{key} is a list of values of the type {kind}; numbers and texts are read")
        size = 8 if kind == _TEXT else struct.calcsize("<" + _SCALARS[kind])
        if count * size > self._left or count > self._items_left:
            raise ValueError(f"{key} claims {count} values, and {self._left} bytes are left")
        self._items_left -= count
        if kind == _TEXT:
            for _ in range(count):
                self._text(key)
        else:
            self._left -= count * size
            self._file.seek(count * size, os.SEEK_CUR)
        return ListInfo(kind == _TEXT, count)

    def _tensor(self, name: str) -> tuple[tuple[int, ...], int, int]:
        """Return shape, first byte and number of bytes of a tensor."""
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        if not 1 <= (num_sides := self._number("I", name)) <= MAX_SIDES:
            raise ValueError(f"{name} has {num_sides} dimensions; 1 to {MAX_SIDES} are possible")
        shape = tuple(self._number("Q", name) for _ in range(num_sides))
        kind, begin = self._number("I", name), self._number("Q", name)
        if kind not in GGML_QUANT_SIZES:
            raise ValueError(f"{name} has the type {kind}, which is not known here")
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        if 0 in shape or shape[0] % block:
            raise ValueError(f"{name} has the sides {list(shape)} in blocks of {block}")
        return shape[::-1], begin, math.prod(shape) // block * block_bytes

    def _check_places(self, tensors: dict[str, tuple[tuple[int, ...], int, int]], alignment: Any) -> None:
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"general.alignment is {alignment!r}; it must be a power of two")
        data_bytes = self._left - -(self._size - self._left) % alignment
        end = 0
        for name, (shape, begin, num_bytes) in sorted(tensors.items(), key=lambda item: item[1][1]):
            if begin % alignment or begin < end or begin + num_bytes > data_bytes:
                raise ValueError(
                    f"{name[:80]}, {list(shape)}, would be the {num_bytes} bytes at {begin}; the tensors before it "
                    f"end at {end}, the file at {data_bytes}, and places are multiples of {alignment}"
                )
            end = begin + num_bytes
