"""Serializes values of samples, data positions and metrics to bytes that contain no code, and back.

The format is JSON.  Values with arrays, tensors, bytes or images become a safetensors file whose tensor ``json`` holds
the JSON.  Types that JSON lacks become a dict with one key: ``{"$tuple": [1, 2]}``, ``{"$array": "3"}`` (a tensor
name).  Subclasses of JSON types are written as their base type.  Dict entries of any other class are left out.
"""

from __future__ import annotations

import datetime
import decimal
import importlib
import json
import logging
import sys
import uuid
from collections.abc import Callable, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch
import xxhash

from slime.utils import safe_pickle
from slime.utils.errors import DataError
from slime.utils.files import read_outside_file, write_atomically

logger = logging.getLogger(__name__)

_TOLD: set[tuple[str, str]] = set()
"""(warning, place) of the warnings logged so far."""
REMEDY = (
    "Keep such objects in a module of your own, and numbers, texts, lists, dicts, arrays or tensors in the sample."
)
MAX_DEPTH = 200
MAX_INT_BITS = 14_000
"""Python refuses to convert longer integers to text."""
_DTYPES = frozenset(
    getattr(torch, name)
    for name in (
        *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
        *("float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"),
    )
)
_ATOMS = frozenset({str, int, float, bool, type(None)})
_TREE = "json"
_DAMAGED = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RecursionError)
"""Errors raised when decoding truncated data or data of an unexpected type."""
_to_json = json.JSONEncoder(separators=(",", ":")).encode

_AS_TEXT: Mapping[str, tuple[type, Callable[[Any], str], Callable[[str], Any]]] = {
    "datetime": (datetime.datetime, datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    "date": (datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
    "path": (PurePath, str, Path),
    "decimal": (decimal.Decimal, str, decimal.Decimal),
    "uuid": (uuid.UUID, str, uuid.UUID),
    "complex": (complex, str, complex),
}


class NotPlainError(DataError):
    """A value, or an item of a list in it, is an object that cannot be serialized."""


def dumps(value: Any, *, name: str = "", warning: str = "") -> bytes:
    """Serialize a value for :func:`loads`.

    Args:
        value: Another thread may change its dicts meanwhile; serialization is then retried.
        name: Name of the value, for the warning.
        warning: Start of the log message that lists what is left out; each place is logged once.

    Raises:
        NotPlainError: the value as a whole cannot be written.
    """
    with suppress(RuntimeError, ValueError):  # the slow path below handles or reports these
        if _is_json(value):
            return _to_json(value).encode()
    for attempt in range(3):
        writer = _Writer(name)
        try:
            tree = _to_json(writer.tree(value)).encode()
            break
        except NotPlainError:
            raise
        except Exception as error:  # user-defined objects may raise anything
            if type(error) is not RuntimeError or attempt == 2:  # RuntimeError: another thread changed a dict
                raise NotPlainError(f"{name} cannot be written ({error!r})") from error
        finally:
            _tell(warning, writer.left_out)
    if not writer.tensors:
        return tree
    return safetensors.torch.save({_TREE: torch.frombuffer(bytearray(tree), dtype=torch.uint8)} | writer.tensors)


def loads(data: bytes, *, where: str | Path, remedy: str = safe_pickle.REMEDY) -> Any:
    """Deserialize the output of :func:`dumps`, or a pickle of an earlier version, without running code.

    Args:
        data: The serialized bytes.
        where: Source of the data, for errors.
        remedy: What the user can do, for errors.

    Raises:
        DataError: the data is damaged, or holds an object that is not plain data.
    """
    if data.startswith(b"PK\x03\x04"):
        return safe_pickle.load_torch(data, where=where, remedy=remedy)
    if data.startswith(b"\x80") and data[8:9] != b"{":
        return safe_pickle.load_pickle(data, where=where, remedy=remedy)
    tensors: dict[str, torch.Tensor] = {}
    try:
        if data[7:9] == b"\0{":  # JSON has no zero bytes
            tensors = safetensors.torch.load(data)
            data = tensors[_TREE].numpy().tobytes()
        return json.loads(data, object_hook=lambda item: _read_tag(item, tensors))
    except (*_DAMAGED, safetensors.SafetensorError) as error:
        raise DataError(
            f"{where} ({len(data)} bytes) is cut or damaged ({type(error).__name__}: {error}). {remedy}"
        ) from error


def _is_json(value: Any) -> bool:
    """Return True if JSON can represent a value as it is, which is the common case."""
    if type(value) is dict:
        return all(type(key) is str and key[:1] != "$" for key in value) and all(map(_is_json, value.values()))
    if type(value) is list:
        return set(map(type, value)) <= _ATOMS or all(map(_is_json, value))
    return type(value) in _ATOMS


def _tell(warning: str, left_out: Mapping[str, str]) -> None:
    places = [f"{place} ({reason})" for place, reason in left_out.items() if (warning, place) not in _TOLD]
    _TOLD.update((warning, place) for place in left_out)
    if warning and places:
        logger.warning("%s %s. %s", warning, ", ".join(places), REMEDY)


class _Writer:
    """Converts a value to JSON types and a dict of tensors.

    Invariant: ``left_out`` maps the place of everything that was not converted to the reason.
    """

    def __init__(self, name: str) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.left_out: dict[str, str] = {}
        self._place = [name]
        self._above: set[int] = set()

    def tree(self, value: Any) -> Any:
        """Convert a value to JSON types."""
        if type(value) in _ATOMS:
            if type(value) is int and value.bit_length() > MAX_INT_BITS:
                raise self._refused(f"an integer of {value.bit_length()} bits")
            return value
        if isinstance(value, dict):
            return self._dict(value)
        if isinstance(value, list):
            return self._list(value)
        for name, known in (("$tuple", tuple), ("$set", set), ("$frozenset", frozenset)):
            if isinstance(value, known):
                return {name: self._list(value)}
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, np.ndarray | np.generic):
            return self._array(value)
        return self._other(value)

    def _other(self, value: Any) -> Any:
        if isinstance(value, bytes | bytearray):
            return self._bytes(value)
        if isinstance(value, str):
            return str.__str__(value)
        if isinstance(value, int | float):
            return int(value) if isinstance(value, int) else float(value)
        for name, (known, as_text, _) in _AS_TEXT.items():
            if isinstance(value, known):
                return {f"${name}": as_text(value)}
        if "PIL.Image" in sys.modules and isinstance(value, sys.modules["PIL.Image"].Image):
            return self._image(value)
        raise self._refused(f"a {type(value).__name__}")

    def _refused(self, reason: str) -> NotPlainError:
        self.left_out["".join(self._place)] = reason
        return NotPlainError(f"{''.join(self._place)} is {reason}")

    @contextmanager
    def _inside(self, value: Any) -> Any:
        if id(value) in self._above or len(self._above) >= MAX_DEPTH:
            raise self._refused("in itself" if id(value) in self._above else f"below {MAX_DEPTH} others")
        self._above.add(id(value))
        try:
            yield
        finally:
            self._above.discard(id(value))

    def _dict(self, value: Mapping[Any, Any]) -> Any:
        items = []
        with self._inside(value):
            for key, item in value.items():
                self._place.append(f"[{key!r}]" if "".join(self._place) else str(key))
                try:
                    items.append((key if type(key) is str else self.tree(key), self.tree(item)))
                except NotPlainError:
                    pass  # it is in left_out
                except (OSError, ValueError, TypeError, AttributeError) as error:  # raised by the object's methods
                    self._refused(f"a {type(item).__name__} that raises {type(error).__name__}")
                finally:
                    self._place.pop()
        if all(type(key) is str and not key.startswith("$") for key, _ in items):
            return dict(items)
        return {"$dict": items}

    def _list(self, value: Any) -> list[Any]:
        if set(map(type, value)) <= _ATOMS:
            return value if type(value) is list else list(value)
        with self._inside(value):
            return [self.tree(item) for item in value]

    def _array(self, value: Any) -> dict[str, str]:
        kind = "$array" if isinstance(value, np.ndarray) else "$scalar"
        try:
            return {kind: self._keep(torch.tensor(value))}
        except (TypeError, ValueError) as error:
            raise self._refused(f"a {type(value).__name__} of {value.dtype}") from error

    def _tensor(self, value: torch.Tensor) -> dict[str, str]:
        if value.dtype not in _DTYPES or value.layout is not torch.strided:
            raise self._refused(f"a tensor of {value.dtype}, {value.layout}")
        return {"$tensor": self._keep(value.detach().to("cpu", copy=True).contiguous())}

    def _image(self, value: Any) -> dict[str, Any]:
        return {"$image": [value.mode, value.size, value.getpalette(), self._bytes(value.tobytes())["$bytes"]]}

    def _bytes(self, value: bytes | bytearray) -> dict[str, str]:
        return {"$bytes": self._keep(torch.tensor(np.frombuffer(value, np.uint8)))}

    def _keep(self, tensor: torch.Tensor) -> str:
        self.tensors[str(len(self.tensors))] = tensor
        return str(len(self.tensors) - 1)


def _read_tag(item: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> Any:
    """Decode a tagged dict such as ``{"$tuple": [...]}``; return other dicts unchanged."""
    kind = next(iter(item), "")
    if len(item) != 1 or not kind.startswith("$"):
        return item
    content = item[kind]
    if kind in _CONTAINERS:
        return _CONTAINERS[kind](content)
    if kind[1:] in _AS_TEXT:
        return _AS_TEXT[kind[1:]][2](content)
    if kind == "$image":
        mode, size, palette, name = content
        safe_pickle.check_image(size, data := tensors[name].numpy().tobytes())
        image = importlib.import_module("PIL.Image").frombytes(mode, tuple(size), data)
        if palette is not None:
            image.putpalette(palette)
        return image
    return _ARRAYS[kind](tensors[content])


_CONTAINERS: Mapping[str, Callable[[Any], Any]] = {
    **{"$tuple": tuple, "$set": set, "$frozenset": frozenset, "$dict": dict}
}
_ARRAYS: Mapping[str, Callable[[torch.Tensor], Any]] = {
    "$tensor": lambda tensor: tensor,
    "$array": lambda tensor: tensor.numpy(),
    "$scalar": lambda tensor: tensor.numpy()[()],
    "$bytes": lambda tensor: tensor.numpy().tobytes(),
}


# Files with the rollout state of a checkpoint: the data position and the ledger position.
#
# A header line with a digest, then the output of ``dumps``.  Files of earlier versions were written by ``torch.save``;
# they are read without running code (``slime.utils.safe_pickle``).


STATE_REMEDY = "Load an earlier checkpoint with --ckpt-step, or copy the file again."
_MARK = b"slime xxh3 "
_SEAL_BYTES = len(_MARK) + 16
_END_BYTES = 22
"""Size of a zip end-of-central-directory record without a comment.  Earlier versions put the digest in the comment."""


def write_state(path: Path, state: Mapping[str, Any], *, what: str) -> None:
    """Atomically write plain values, arrays and tensors; other objects are left out with a warning.

    Args:
        path: Output file.
        state: Content of the file.
        what: Name of the content, for errors.
    """
    body = dumps(dict(state), warning=f"{what} is stored without")
    write_atomically(path, lambda file: file.write(_head(body) + body), what=what)


def _head(body: bytes) -> bytes:
    return b'{"format": "slime state", "xxh3": "%s"}\n' % xxhash.xxh3_64_hexdigest(body).encode()


def read_state(path: Path, *, what: str) -> dict[str, Any]:
    """Read a file of ``write_state`` or of an earlier version.

    Raises:
        DataError: the file is truncated, damaged, or holds more than plain data.
    """
    try:
        data = read_outside_file(path, max_bytes=safe_pickle.MAX_BYTES)
    except DataError as error:
        raise DataError(f"{what} cannot be read: {error} {STATE_REMEDY}") from error
    if data.startswith(b"PK"):
        is_whole = data[-_END_BYTES:].startswith(b"PK\5\6") or data.endswith(_seal(data[:-_SEAL_BYTES]))
    else:
        head, newline, body = data.partition(b"\n")
        is_whole = data.startswith(b"\x80") or head + newline == _head(body)
        data = data if data.startswith(b"\x80") else body
    if not is_whole:
        raise DataError(f"{what} {path} cannot be read: its {len(data)} bytes are cut or damaged. {STATE_REMEDY}")
    state = loads(data, where=path, remedy=STATE_REMEDY)
    if not isinstance(state, dict):
        raise DataError(f"{what} {path} holds a {type(state).__name__} instead of a dict. {STATE_REMEDY}")
    return state


def _seal(body: bytes) -> bytes:
    return _MARK + xxhash.xxh3_64_hexdigest(body).encode()
