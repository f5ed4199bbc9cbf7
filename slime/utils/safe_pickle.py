"""Reads pickles from others without running their code.

A pickle names the callables that rebuild its objects, and Python's unpickler calls any of them, even ``os.system``.
This reader accepts only the names in ``_PLAIN`` and ``_BUILT``: containers, numbers, texts, times, paths, arrays,
tensors, images, named records.  Any other name is an error, or, in files of which only a part is needed, an inert
placeholder.  State is set only on objects created by the load itself.

``torch.load`` reads files of ``torch.save`` with this reader.  Its own ``weights_only=True`` reads only protocol 2,
and has a single process-wide list of names.
"""

from __future__ import annotations

import collections
import importlib
import io
import math
import os
import pickle
import struct
import zipfile
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from slime.utils.errors import DataError
from slime.utils.files import read_outside_file

DAMAGE = (
    *(pickle.UnpicklingError, EOFError, OSError, RuntimeError, MemoryError, zipfile.BadZipFile, struct.error),
    *(AttributeError, ImportError, LookupError, TypeError, ValueError, ArithmeticError, AssertionError),
)
"""All errors that unpickling truncated or damaged bytes can raise."""

REMEDY = "Write the file again without it."
MAX_BYTES = min(64 << 30, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4)
"""Maximum file size: files are read into memory, and tensors are copied out of them."""
ITEMS_PER_BYTE = 64
"""Limit of items that a traversal passes, per byte of the pickle: a list at several places is traversed repeatedly."""
REPEATS, FREE_BYTES = 16, 16 << 20
"""A tensor may repeat its bytes up to ``REPEATS`` times, like an expanded tensor; more often up to ``FREE_BYTES``."""

MAX_RANGE = 1 << 20


class RefusedError(Exception):
    """A pickle needs something that is not on the list."""


def load_pickle(data: bytes, *, where: str | Path, tolerant: bool = False, remedy: str = REMEDY) -> Any:
    """Load a pickle.

    Args:
        where: the data's name in errors.
        tolerant: replace objects of unlisted classes by placeholders instead of raising an error.
        remedy: last sentence of the error about such objects.

    Raises:
        DataError: the bytes are damaged, or need something that is not on the list.
    """
    with _as_data_error(where, data, remedy):
        return (_TolerantReader if tolerant else _Reader)(io.BytesIO(data)).load()


def load_torch(data: bytes, *, where: str | Path, tolerant: bool = False, remedy: str = REMEDY) -> Any:
    """Load the output of ``torch.save``, with tensors on the CPU; see :func:`load_pickle`."""
    import torch

    reader = _TolerantReader if tolerant else _Reader
    with _as_data_error(where, data, remedy):
        if zipfile.is_zipfile(io.BytesIO(data)):
            _check_archive(data)
        module = SimpleNamespace(__name__="safe", Unpickler=reader, load=lambda file, **kw: reader(file, **kw).load())
        return torch.load(io.BytesIO(data), map_location="cpu", pickle_module=module, weights_only=False)


def read_torch_file(path: Path, *, remedy: str = REMEDY) -> Any:
    """Load a file written by ``torch.save``; see :func:`load_torch`.

    Raises:
        DataError: the file cannot be read, is damaged, or needs something that is not on the list.
    """
    return load_torch(read_outside_file(path, max_bytes=MAX_BYTES), where=path, remedy=remedy)


@contextmanager
def _as_data_error(where: str | Path, data: bytes, remedy: str) -> Iterator[None]:
    try:
        yield
    except RefusedError as error:
        raise DataError(
            f"{where} holds {error}, and reading that could run code from the file's author; only plain data, arrays "
            f"and tensors are read. {remedy}"
        ) from None
    except DAMAGE as error:
        reason = " ".join(str(error).split())[:200]
        raise DataError(
            f"{where} ({len(data)} bytes) is cut or damaged ({type(error).__name__}: {reason}); copy it again."
        ) from error


def _check_archive(data: bytes) -> None:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = archive.infolist()
    if any(entry.filename.endswith("/constants.pkl") for entry in entries):
        raise RefusedError("a TorchScript program")
    is_stored = all(entry.compress_type == zipfile.ZIP_STORED for entry in entries)
    if not is_stored or sum(entry.file_size for entry in entries) > len(data):
        raise RefusedError("compressed or overlapping parts, which torch.save does not write")


class Placeholder:
    """Stands in for an object of an unlisted class; accepts every pickle operation and stores nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Placeholder:
        return self

    def __setitem__(self, key: Any, value: Any) -> None: ...

    def __setstate__(self, state: Any) -> None: ...

    def append(self, item: Any) -> None:
        """Ignore a list item."""

    def extend(self, items: Any) -> None:
        """Ignore list items."""

    def add(self, item: Any) -> None:
        """Ignore a set item."""


_PythonReader: Any = pickle._Unpickler


class _Reader(_PythonReader):
    """Based on Python's pure-Python unpickler: with the C one, six bytes can allocate a huge memo."""

    def __init__(self, file: Any, *, encoding: str = "utf-8") -> None:
        super().__init__(file, encoding=encoding)
        self._num_bytes = len(file.getbuffer())

    def load(self) -> Any:
        value = super().load()
        if _num_items(value, {}) > max(self._num_bytes, 1 << 16) * ITEMS_PER_BYTE:
            raise RefusedError("lists that contain each other so often that traversing them would not end")
        return value

    def find_class(self, module: str, name: str) -> Any:
        module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
        if f"{module}.{name}" in _BUILT:
            return _BUILT[f"{module}.{name}"]
        if name in _PLAIN.get(module, ()):
            return getattr(importlib.import_module(module), name)
        if module == "torch":
            import torch

            if isinstance(value := getattr(torch, name, None), torch.dtype | torch.layout | torch.memory_format):
                return value
        if module.startswith("PIL.") and name in ("Image", *(f"{kind}ImageFile" for kind in _IMAGES)):
            return importlib.import_module("PIL.Image").Image
        return self.find_unlisted(module, name)

    def find_unlisted(self, module: str, name: str) -> Any:
        raise RefusedError(f"{module}.{name}")

    def _fill(self) -> None:
        state = self.stack.pop()
        thing = self.stack[-1]
        kind = type(thing)
        full = f"{kind.__module__}.{kind.__qualname__}"
        if isinstance(thing, Placeholder) or full == "collections.OrderedDict":  # its attributes
            return
        if kind.__name__ in _RECORDS.get(kind.__module__, ()):
            _fill_record(thing, state)
        elif full in _FILLED or kind.__module__ == "numpy.dtypes":
            _FILLED.get(full, _fill_dtype)(thing, state)
        else:
            raise RefusedError(f"a change of {full if kind is not type else thing.__qualname__}")

    dispatch = {**_PythonReader.dispatch, pickle.BUILD[0]: _fill}


class _TolerantReader(_Reader):
    def find_unlisted(self, module: str, name: str) -> Any:
        return type(name.split(".")[-1], (Placeholder,), {"__module__": module})


_ATOMS = frozenset({str, int, float, bool, type(None), bytes})


def _num_items(value: Any, known: dict[int, int]) -> int:
    """Count the items that a traversal passes; a list at two places counts twice, a list inside itself once."""
    if isinstance(value, dict):
        items: Any = [*value, *value.values()]
    elif isinstance(value, list | tuple | set | frozenset):
        items = value
    else:
        items = vars(value).values() if hasattr(value, "__dict__") else ()
    if not items or id(value) in known:
        return known.get(id(value), 1)
    known[id(value)] = 0
    if set(map(type, items)) <= _ATOMS:
        known[id(value)] = 1 + len(items)
    else:
        known[id(value)] = 1 + sum(1 if type(item) in _ATOMS else _num_items(item, known) for item in items)
    return known[id(value)]


# -------------------------------------------------------------------------------------- construction of listed objects


def _bytes(text: Any = b"", encoding: str = "latin1") -> bytes:
    """Return bytes that protocol 2 stores as text.  Refuses a number, which ``bytes`` would take as a length."""
    if isinstance(text, bytes | bytearray):
        return bytes(text)
    if not isinstance(text, str) or encoding.lower().replace("-", "") not in ("latin1", "utf8", "ascii"):
        raise RefusedError(f"bytes made of a {type(text).__name__} in the encoding {encoding[:40]!r}")
    return text.encode(encoding)


def _made_of_list(kind: Callable[[Any], Any]) -> Callable[..., Any]:
    def make(items: Any = (), maxlen: None = None) -> Any:
        if not isinstance(items, list | tuple | set | frozenset | dict):
            raise RefusedError(f"a container made of a {type(items).__name__}")
        return kind(items)

    return make


def _defaultdict(factory: Any = None) -> Any:
    if factory not in (None, bool, int, float, str, list, tuple, dict, set):
        raise RefusedError("a defaultdict of something other than a plain type")
    return collections.defaultdict(factory)


def _range(*bounds: int) -> range:
    if len(made := range(*bounds)) > MAX_RANGE:
        raise RefusedError(f"a range of more than {MAX_RANGE} numbers")
    return made


def _bare(kind: Any, base: Any = object, state: Any = None) -> Any:
    """Return an object without state, as created by protocols 0 and 1."""
    if not isinstance(kind, type) or kind.__name__ not in _RECORDS.get(kind.__module__, ()):
        raise RefusedError(f"a bare {getattr(kind, '__name__', type(kind).__name__)}")
    return object.__new__(kind)


def _fill_record(thing: Any, state: Any) -> None:
    if hasattr(thing, "__setstate__"):  # torch's TensorProperties
        thing.__setstate__(state)
        return
    if isinstance(state, tuple) and len(state) == 2 and not state[1]:
        state = state[0]
    if not isinstance(state, dict) or not all(type(key) is str and key[:2] != "__" for key in state):
        raise RefusedError(f"a {type(thing).__qualname__} whose fields are no fields")
    vars(thing).update(state)


def _fill_file(thing: io.BytesIO, state: Any) -> None:
    content, position, _ = state
    thing.write(content)
    thing.seek(min(position, len(content)))


def check_image(size: Any, data: Any) -> None:
    """Check that an image has at least one bit per pixel, because memory for all pixels is allocated first.

    Raises:
        ValueError: it has fewer.
    """
    if len(size) != 2 or min(size) < 0 or not isinstance(data, bytes) or math.prod(size) > 8 * len(data):
        raise ValueError(f"an image of {str(size)[:80]} in {len(data)} bytes")


def _fill_image(image: Any, state: Any) -> None:
    """Fill an image from its pixels; a file name in the state is ignored."""
    info, mode, size, palette, data = state[:5]
    check_image(size, data)
    type(image).__setstate__(image, [info if isinstance(info, dict) else {}, mode, tuple(size), palette, data])


def _dtype(text: str, align: Any = False, copy: Any = False) -> Any:
    """Return a fresh dtype that nothing else refers to, so that the pickle may set its byte order."""
    import numpy as np

    if not isinstance(text, str):
        raise RefusedError(f"numpy's dtype {str(text)[:40]!r}")
    return np.dtype(text, copy=True)


def _fill_dtype(dtype: Any, state: Any) -> None:
    is_text = dtype.kind in "SU"
    sizes = (dtype.itemsize, dtype.alignment) if is_text else (-1, -1)
    dtype.__setstate__((3, "|" if state[1] not in ("<", ">") else state[1], None, None, None, *sizes, dtype.flags))


def _empty_array(kind: Any, shape: Any, code: Any) -> Any:
    import numpy as np

    return np.empty(0, "b")


def _array_of_buffer(buffer: Any, dtype: Any, shape: Any, order: Any) -> Any:
    import numpy as np

    return np.frombuffer(bytearray(buffer), dtype).reshape(shape, order=order)


def _scalar(dtype: Any, data: Any) -> Any:
    import numpy as np

    (value,) = np.frombuffer(_bytes(data), dtype)
    return value


def _tensor(
    storage: Any, offset: int, size: Any, stride: Any, requires_grad: Any = False, hooks: Any = None,
    dtype: Any = None, metadata: Any = None,
) -> Any:  # fmt: skip
    """Return a view within a storage; refuses a view beyond it, for which torch would enlarge the storage."""
    import torch

    dtype, num_bytes, num_elements = dtype or storage.dtype, storage._untyped_storage.nbytes(), math.prod(size)
    end = offset + sum((side - 1) * step for side, step in zip(size, stride, strict=True)) + 1 if num_elements else 0
    is_outside = min(offset, *size, *stride, 0) < 0 or end * dtype.itemsize > num_bytes
    if is_outside or num_elements * dtype.itemsize > max(REPEATS * num_bytes, FREE_BYTES):
        raise RefusedError(f"a tensor of {str(size)[:80]} {dtype} in {num_bytes} bytes")
    tensor = torch.empty(0, dtype=dtype).set_(storage._untyped_storage, offset, tuple(size), tuple(stride))
    return tensor.requires_grad_() if requires_grad else tensor


def _parameter(data: Any, requires_grad: Any = True, hooks: Any = None, state: Any = None) -> Any:
    import torch

    return torch.nn.Parameter(data, requires_grad=bool(requires_grad))


def _tensor_of_class(make: Any, kind: Any, arguments: Any, state: Any) -> Any:
    """Return a tensor without the attributes or subclass that it had."""
    if make not in (_tensor, _parameter):
        raise RefusedError(f"a tensor made by {make}")
    return make(*arguments)


def _layout(name: str) -> Any:
    import torch

    if not isinstance(value := getattr(torch, name.removeprefix("torch."), None), torch.layout):
        raise RefusedError(f"the layout {name[:40]!r}")
    return value


_CHECKPOINT = "torch.distributed.checkpoint"
_SHARDS = "torch.distributed._shard.sharded_tensor.metadata"
_IMAGES = ("Png", "Jpeg", "WebP", "Bmp", "Gif", "Tiff")
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
"""Module -> classes whose state is their fields."""
_ENUMERATIONS: Mapping[str, tuple[str, ...]] = {
    "signal": ("Signals",),
    f"{_CHECKPOINT}.metadata": ("_MEM_FORMAT_ENCODING",),
    f"{_CHECKPOINT}.filesystem": ("SerializationFormat",),
    f"{_CHECKPOINT}.planner": ("WriteItemType",),
    _SHARDS: ("MEM_FORMAT_ENCODING",),
}
_PLAIN: Mapping[str, tuple[str, ...]] = {
    "builtins": ("bool", "int", "float", "complex", "str", "list", "tuple", "dict", "slice"),
    "pathlib": ("Path", "PosixPath", "PurePath", "PurePosixPath", "PureWindowsPath"),
    "datetime": ("datetime", "date", "time", "timedelta", "timezone"),
    "decimal": ("Decimal",),
    "uuid": ("UUID",),
    "io": ("BytesIO",),
    "_io": ("BytesIO",),
    "torch": ("Size", "device", "UntypedStorage"),
    "torch.storage": ("UntypedStorage",),
    **{
        module: (*_RECORDS.get(module, ()), *_ENUMERATIONS.get(module, ()))
        for module in (*_RECORDS, *_ENUMERATIONS)
    },
}  # fmt: skip
"""Module -> names that are imported as they are."""
_BUILT: Mapping[str, Any] = {
    "builtins.object": object, "builtins.range": _range,
    "builtins.bytes": _bytes, "builtins.bytearray": lambda *given: bytearray(_bytes(*given)), "_codecs.encode": _bytes,
    "builtins.set": _made_of_list(set), "builtins.frozenset": _made_of_list(frozenset),
    "collections.OrderedDict": _made_of_list(collections.OrderedDict),
    "collections.Counter": _made_of_list(collections.Counter), "collections.deque": _made_of_list(collections.deque),
    "collections.defaultdict": _defaultdict, "copyreg._reconstructor": _bare,
    "numpy.dtype": _dtype, "numpy.ndarray": None,
    **{f"numpy.{core}.multiarray._reconstruct": _empty_array for core in ("core", "_core")},
    **{f"numpy.{core}.multiarray.scalar": _scalar for core in ("core", "_core")},
    **{f"numpy.{core}.numeric._frombuffer": _array_of_buffer for core in ("core", "_core")},
    "torch._utils._rebuild_tensor": _tensor, "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor,
    "torch._utils._rebuild_parameter": _parameter, "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._tensor._rebuild_from_type_v2": _tensor_of_class, "torch.serialization._get_layout": _layout,
    "torch.Tensor": None, "torch.nn.parameter.Parameter": None,
}  # fmt: skip
"""Name -> function above that replaces it; None if the name only tells another function which class to make."""
_FILLED: Mapping[str, Callable[[Any, Any], None]] = {
    "_io.BytesIO": _fill_file,
    "PIL.Image.Image": _fill_image,
    "numpy.ndarray": lambda array, state: array.__setstate__(tuple(state)),
    "uuid.UUID": lambda thing, state: object.__setattr__(thing, "int", state["int"]),
}
"""Kind of object -> function that sets its state."""
