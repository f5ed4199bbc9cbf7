"""What a pickle of others may hold, and how each is made: containers, numbers, texts, times, paths, arrays, tensors,
images, and named records.

A name in a pickle becomes a :class:`Recipe`, never the class or function itself.  So a pickle has in its hands what
was made in this load, and values that nobody can change.  Arguments are checked before they cost memory.
"""

from __future__ import annotations

import collections
import datetime
import decimal
import fractions
import functools
import importlib
import io
import math
import pathlib
import re
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

MAX_RANGE = 1 << 20
REPEATS = 16
"""A tensor may show its bytes so often, as an expanded one does; a small one oftener, up to ``FREE_BYTES``."""
FREE_BYTES = 16 << 20

_CHECKPOINT = "torch.distributed.checkpoint"
_SHARDS = "torch.distributed._shard.sharded_tensor.metadata"
_RECORDS: Mapping[str, tuple[str, ...]] = {
    "argparse": ("Namespace",),
    "types": ("SimpleNamespace",),
    f"{_CHECKPOINT}.metadata": (
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "TensorStorageMetadata"),
        *("BytesStorageMetadata", "ChunkStorageMetadata"),
    ),
    f"{_CHECKPOINT}.filesystem": ("_StorageInfo", "_StoragePrefix"),
    f"{_CHECKPOINT}.planner": ("SavePlan", "WriteItem", "TensorWriteData"),
    _SHARDS: ("TensorProperties",),
}
_ENUMERATIONS: Mapping[str, tuple[str, ...]] = {
    "signal": ("Signals",),
    f"{_CHECKPOINT}.metadata": ("_MEM_FORMAT_ENCODING",),
    f"{_CHECKPOINT}.filesystem": ("SerializationFormat",),
    f"{_CHECKPOINT}.planner": ("WriteItemType",),
    _SHARDS: ("MEM_FORMAT_ENCODING",),
}
_IMAGES = frozenset(f"PIL.{name}ImagePlugin.{name}ImageFile" for name in ("Png", "Jpeg", "WebP", "Bmp", "Gif", "Tiff"))
_STORAGES: Mapping[str, str] = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8",
    "ByteStorage": "uint8", "BoolStorage": "bool", "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128", "UntypedStorage": "uint8",
}  # fmt: skip
_NUMPY_DTYPE = re.compile(r"([<>=|]?)([biufcSU]\d{1,9}|O8?)")


class RefusedError(Exception):
    """A pickle asks for something that is not on the list."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How objects of one name are made."""

    name: str
    call: Callable[..., Any] | None = None
    """Of the arguments in the pickle."""
    new: Callable[[], Any] | None = None
    """Without arguments; :func:`fill` adds the content."""
    value: Any = None
    """What a finished object shows of the name, or computes with: the dtype of a storage, the factory of a dict."""


@dataclass(frozen=True, slots=True, eq=False)
class Storage:
    """The bytes under tensors; they come through the file's list of storages alone."""

    data: torch.Tensor
    dtype: torch.dtype


@functools.lru_cache(maxsize=1024)
def find(module: str, name: str) -> Any:
    """Return the recipe of a name, or the value that nobody can change; None for a name that is not on the list."""
    full = f"{module}.{name}"
    factory = _FACTORIES.get(name) if module == "builtins" else None
    if full in _CALLS or factory is not None or full in _MARKS:
        return Recipe(full, call=_CALLS.get(full), value=factory)
    if full in _BARE:
        return Recipe(full, call=_BARE[full], new=_BARE[full])
    if name in _RECORDS.get(module, ()):
        kind = getattr(importlib.import_module(module), name)
        _FILL[kind] = _fill_record
        return Recipe(full, call=functools.partial(_bare, kind), new=functools.partial(_bare, kind))
    if name in _ENUMERATIONS.get(module, ()):
        return Recipe(full, call=functools.partial(_member, getattr(importlib.import_module(module), name)))
    if full == "PIL.Image.Image" or full in _IMAGES:
        kind = importlib.import_module("PIL.Image").Image
        _FILL[kind] = _fill_image
        return Recipe(full, new=functools.partial(_bare, kind))
    return _find_of_torch(module, name) if module.partition(".")[0] == "torch" else None


def fill(thing: Any, state: Any) -> Any:
    """Return a thing made in this load with the state that the pickle gives it.

    Raises:
        RefusedError: it is of a type that takes none.
    """
    kind = type(thing)
    if isinstance(thing, Recipe) or kind not in _FILL:
        raise RefusedError(f"a change of {thing.name if isinstance(thing, Recipe) else kind.__qualname__}")
    return _FILL[kind](thing, state)


def _bare(kind: Any) -> Any:
    return kind.__new__(kind)


def _member(kind: Any, value: int | str) -> Any:
    return kind(value)


def _fill_record(thing: Any, state: Any) -> Any:
    if hasattr(thing, "__setstate__"):  # torch's TensorProperties
        thing.__setstate__(state)
        return thing
    if isinstance(state, tuple) and len(state) == 2 and not state[1]:
        state = state[0]
    if not isinstance(state, dict) or not all(type(key) is str and key[:2] != "__" for key in state):
        raise RefusedError(f"a {type(thing).__qualname__} whose fields are no fields")
    vars(thing).update(state)
    return thing


# ---------------------------------------------------------------------------------------- numbers, texts, containers


def _bytes(text: Any = b"", encoding: str = "latin1") -> bytes:
    """Return bytes that a pickle of protocol 2 holds as text; a number would be a length."""
    if isinstance(text, bytes | bytearray):
        return bytes(text)
    if not isinstance(text, str) or encoding.lower().replace("-", "") not in ("latin1", "utf8", "ascii"):
        raise RefusedError(f"bytes made of a {type(text).__name__} in the encoding {encoding[:40]!r}")
    return text.encode(encoding)


def _made_of_list(kind: Callable[[Any], Any]) -> Callable[..., Any]:
    def make(items: Any = ()) -> Any:
        if not isinstance(items, list | tuple | set | frozenset | dict):
            raise RefusedError(f"a container made of a {type(items).__name__}")
        return kind(items)

    return make


def _deque(items: Any = (), maxlen: int | None = None) -> Any:
    return collections.deque(_made_of_list(list)(items), maxlen)


def _defaultdict(factory: Any = None) -> Any:
    if not (factory is None or (isinstance(factory, Recipe) and factory.value in _FACTORIES.values())):
        raise RefusedError("a defaultdict of something else than a plain type")
    return collections.defaultdict(None if factory is None else factory.value)


def _range(*bounds: int) -> range:
    if not (all(type(bound) is int for bound in bounds) and len(result := range(*bounds)) <= MAX_RANGE):
        raise RefusedError(f"a range of more than {MAX_RANGE} numbers")
    return result


def _fraction(numerator: int | str, denominator: int = 1) -> fractions.Fraction:
    if isinstance(numerator, str):  # "1e999999999" would be computed
        numerator, denominator = map(int, f"{numerator}/1".split("/")[:2])
    return fractions.Fraction(numerator, denominator)


def _reconstructor(kind: Any, base: Any, state: Any) -> Any:
    """Return a bare object, as pickles of protocols 0 and 1 make it."""
    if not (isinstance(kind, Recipe) and kind.new is not None and state is None):
        raise RefusedError(f"a {getattr(kind, 'name', type(kind).__name__)} made as a subclass")
    return kind.new()


def _fill_nothing(thing: Any, state: Any) -> Any:
    return thing


def _fill_uuid(thing: Any, state: Any) -> uuid.UUID:
    made = uuid.UUID(int=state["int"])
    object.__setattr__(thing, "int", made.int)
    object.__setattr__(thing, "is_safe", made.is_safe)
    return thing


def _fill_file(thing: io.BytesIO, state: Any) -> io.BytesIO:
    content, position, attributes = state
    if attributes or not 0 <= position <= len(content):
        raise RefusedError("a BytesIO with attributes, or a position beyond its end")
    thing.write(content)
    thing.seek(position)
    return thing


def check_image(size: Any, data: Any) -> None:
    """Check that an image has the bytes for its pixels, at least one bit for each: their memory comes first.

    Raises:
        ValueError: it has not.
    """
    if len(size) != 2 or min(size) < 0 or not isinstance(data, bytes) or math.prod(size) > 8 * len(data):
        raise ValueError(f"an image of {str(size)[:80]} in {len(data)} bytes")


def _fill_image(image: Any, state: Any) -> Any:
    """Fill an image from its pixels; a name of a file in it is passed over."""
    info, mode, size, palette, data = state[:5]
    check_image(size, data)
    type(image).__setstate__(image, [info if isinstance(info, dict) else {}, mode, tuple(size), palette, data])
    return image


# ------------------------------------------------------------------------------------------------------------- numpy


def _dtype(text: str, align: Any = False, copy: Any = False) -> Any:
    """Return a dtype that no other part of the program has."""
    import numpy as np

    if not isinstance(text, str) or not _NUMPY_DTYPE.fullmatch(text):
        raise RefusedError(f"numpy's dtype {str(text)[:40]!r}")
    _FILL.setdefault(np.ndarray, _fill_array)
    made = np.dtype(text, copy=True)
    _FILL.setdefault(type(made), _fill_dtype)
    return made


def _fill_dtype(dtype: Any, state: Any) -> Any:
    """Return the dtype in the order of bytes that the state names; nothing else of it can differ."""
    return dtype.newbyteorder(">") if state[1] == ">" else dtype


def _empty_array(kind: Any, shape: Any, code: Any) -> Any:
    import numpy as np

    _FILL.setdefault(np.ndarray, _fill_array)
    return np.ndarray.__new__(np.ndarray, (0,), np.dtype("b"))


def _fill_array(array: Any, state: Any) -> Any:
    _, shape, dtype, is_fortran, data = state
    _check_array(shape, dtype, data)
    array.__setstate__((1, shape, dtype, bool(is_fortran), data))
    return array


def _check_array(shape: Any, dtype: Any, data: Any) -> None:
    import numpy as np

    is_shape = isinstance(shape, tuple) and all(type(side) is int and side >= 0 for side in shape)
    is_data = isinstance(dtype, np.dtype) and isinstance(data, list if dtype.hasobject else bytes | bytearray)
    if not is_shape or not is_data or len(data) != math.prod(shape) * (1 if dtype.hasobject else dtype.itemsize):
        raise RefusedError(f"an array of {str(shape)[:80]} {str(dtype)[:40]} in another size of {type(data).__name__}")


def _array_of_buffer(buffer: Any, dtype: Any, shape: Any, order: str) -> Any:
    import numpy as np

    _check_array(shape, dtype, buffer)
    return np.frombuffer(bytearray(buffer), dtype).reshape(shape, order="F" if order == "F" else "C")


def _scalar(dtype: Any, data: Any) -> Any:
    import numpy as np

    data = _bytes(data)
    _check_array((), dtype, data)
    return np.frombuffer(data, dtype)[0]


# ------------------------------------------------------------------------------------------------------------- torch


def _find_of_torch(module: str, name: str) -> Any:
    import torch

    value = getattr(torch, name.removeprefix("torch."), None) if module in ("torch", "torch._utils") else None
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
        return value
    if module in ("torch", "torch.storage") and name in _STORAGES:
        return Recipe(f"{module}.{name}", value=getattr(torch, _STORAGES[name]))
    return None


def _tensor(
    storage: Any, offset: int, size: Any, stride: Any, requires_grad: Any = False, hooks: Any = None,
    dtype: Any = None, metadata: Any = None,
) -> torch.Tensor:  # fmt: skip
    """Return a view of a storage, which torch keeps inside of it."""
    import torch

    if not isinstance(storage, Storage):
        raise RefusedError("a tensor without bytes")
    dtype = storage.dtype if dtype is None else dtype
    bounds, num_bytes = (*size, *stride, offset), storage.data.numel()
    if not all(type(bound) is int and bound >= 0 for bound in bounds) or len(size) != len(stride):
        raise RefusedError(f"a tensor of {str(size)[:80]} with the strides {str(stride)[:80]}")
    num_elements = math.prod(size)
    end = offset + sum((side - 1) * step for side, step in zip(size, stride, strict=True)) + 1 if num_elements else 0
    if end * dtype.itemsize > num_bytes or num_elements * dtype.itemsize > max(REPEATS * num_bytes, FREE_BYTES):
        raise RefusedError(f"a tensor of {str(size)[:80]} {dtype} in {num_bytes} bytes")
    flat = storage.data.view(dtype) if num_bytes else torch.empty(0, dtype=dtype)
    tensor = torch.as_strided(flat, tuple(size), tuple(stride), offset if num_elements else 0)
    return tensor.requires_grad_() if requires_grad else tensor


def _parameter(data: Any, requires_grad: Any = True, hooks: Any = None, state: Any = None) -> torch.Tensor:
    import torch

    return torch.nn.Parameter(data, requires_grad=bool(requires_grad))


def _tensor_of_class(call: Any, kind: Any, arguments: Any, state: Any) -> torch.Tensor:
    """Return a tensor that had attributes, or another class, without these."""
    if not (isinstance(call, Recipe) and call.call in (_tensor, _parameter)):
        raise RefusedError(f"a tensor made by {getattr(call, 'name', call)}")
    return call.call(*arguments)


def _size(sides: Any) -> Any:
    import torch

    return torch.Size(sides)


def _device(kind: str, index: int | None = None) -> Any:
    import torch

    return torch.device(kind) if index is None else torch.device(kind, index)


def _layout(name: str) -> Any:
    import torch

    if not isinstance(value := getattr(torch, name.removeprefix("torch."), None), torch.layout):
        raise RefusedError(f"the layout {name[:40]!r}")
    return value


_FACTORIES: Mapping[str, type] = {
    kind.__name__: kind for kind in (bool, int, float, str, list, tuple, dict, set, object)
}
_MARKS = frozenset(("numpy.ndarray", "torch.Tensor", "torch.nn.parameter.Parameter"))
"""Names that only say for which class another one is called."""
_PATHS = {
    f"pathlib.{name}": getattr(pathlib, name)
    for name in ("Path", "PosixPath", "PurePath", "PurePosixPath", "PureWindowsPath")
}
_TIMES = {
    f"datetime.{name}": getattr(datetime, name) for name in ("datetime", "date", "time", "timedelta", "timezone")
}
_ARRAY_MODULES = ("numpy.core", "numpy._core")
_CALLS: Mapping[str, Callable[..., Any]] = {
    "builtins.complex": complex, "builtins.slice": slice, "builtins.range": _range,
    "builtins.bytes": _bytes, "builtins.bytearray": lambda *given: bytearray(_bytes(*given)), "_codecs.encode": _bytes,
    "builtins.set": _made_of_list(set), "builtins.frozenset": _made_of_list(frozenset),
    "collections.Counter": _made_of_list(collections.Counter), "collections.deque": _deque,
    "collections.defaultdict": _defaultdict, "copyreg._reconstructor": _reconstructor,
    **_PATHS, **_TIMES,
    "decimal.Decimal": decimal.Decimal, "fractions.Fraction": _fraction,
    "numpy.dtype": _dtype,
    **{f"{module}.multiarray._reconstruct": _empty_array for module in _ARRAY_MODULES},
    **{f"{module}.multiarray.scalar": _scalar for module in _ARRAY_MODULES},
    **{f"{module}.numeric._frombuffer": _array_of_buffer for module in _ARRAY_MODULES},
    "torch._utils._rebuild_tensor": _tensor, "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor,
    "torch._utils._rebuild_parameter": _parameter, "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._tensor._rebuild_from_type_v2": _tensor_of_class,
    "torch.Size": _size, "torch.device": _device, "torch.serialization._get_layout": _layout,
}  # fmt: skip
_BARE: Mapping[str, Callable[..., Any]] = {
    "uuid.UUID": lambda: uuid.UUID.__new__(uuid.UUID),
    "io.BytesIO": io.BytesIO,
    "_io.BytesIO": io.BytesIO,
    "collections.OrderedDict": _made_of_list(collections.OrderedDict),
}
_FILL: dict[type, Callable[[Any, Any], Any]] = {
    SimpleNamespace: _fill_record,
    collections.OrderedDict: _fill_nothing,  # attributes beside its items
    io.BytesIO: _fill_file,
    uuid.UUID: _fill_uuid,
}
