"""Pickles that others wrote, read without running their code.

A pickle names the callables that rebuild its objects, and Python's own reader calls whatever is named, ``os.system``
too.  The readers here call only what is on a list of data types: numbers, containers, paths, times, arrays, tensors,
images, and the records with which torch describes a checkpoint folder.  Any other name is an error; in files of which
only a part is needed it becomes a placeholder, which does nothing.
"""

from __future__ import annotations

import enum
import functools
import importlib
import io
import pickle
import zipfile
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from slime.utils.errors import DataError

_ARRAY_MODULES = ("numpy.core.multiarray", "numpy._core.multiarray")
_IMAGE_FORMATS = ("Png", "Jpeg", "WebP", "Bmp", "Gif", "Tiff")
_NUMPY_TYPES = ("Bool", "Int8", "Int16", "Int32", "Int64", "UInt8", "UInt16", "UInt32", "UInt64")

DATA_TYPES: Mapping[str, frozenset[str]] = {
    "builtins": frozenset(
        "bool int float complex str bytes bytearray list tuple dict set frozenset range slice object".split()
    ),
    "collections": frozenset(("OrderedDict", "defaultdict", "deque", "Counter")),
    "argparse": frozenset(("Namespace",)),
    "types": frozenset(("SimpleNamespace",)),
    "datetime": frozenset(("datetime", "date", "time", "timedelta", "timezone")),
    "decimal": frozenset(("Decimal",)),
    "fractions": frozenset(("Fraction",)),
    "uuid": frozenset(("UUID",)),
    "signal": frozenset(("Signals",)),
    "pathlib": frozenset(("Path", "PosixPath", "PurePath", "PurePosixPath", "PureWindowsPath")),
    **dict.fromkeys(("io", "_io"), frozenset(("BytesIO",))),
    "copyreg": frozenset(("_reconstructor",)),
    "numpy": frozenset(("ndarray", "dtype")),
    **dict.fromkeys(_ARRAY_MODULES, frozenset(("_reconstruct", "scalar"))),
    **dict.fromkeys(("numpy.core.numeric", "numpy._core.numeric"), frozenset(("_frombuffer",))),
    "numpy.dtypes": frozenset(f"{name}DType" for name in (*_NUMPY_TYPES, "Float16", "Float32", "Float64")),
    "PIL.Image": frozenset(("Image",)),
    **{f"PIL.{name}ImagePlugin": frozenset((f"{name}ImageFile",)) for name in _IMAGE_FORMATS},
    "torch.distributed.checkpoint.metadata": frozenset(
        (
            *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "TensorStorageMetadata"),
            *("BytesStorageMetadata", "ChunkStorageMetadata", "_MEM_FORMAT_ENCODING"),
        )
    ),
    "torch.distributed.checkpoint.filesystem": frozenset(("_StorageInfo", "_StoragePrefix", "SerializationFormat")),
    "torch.distributed.checkpoint.planner": frozenset(("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData")),
    "torch.distributed._shard.sharded_tensor.metadata": frozenset(("TensorProperties", "MEM_FORMAT_ENCODING")),
}
"""Module -> names that a pickle may use, beside those that ``torch.load(weights_only=True)`` allows."""

DAMAGE = (
    *(pickle.UnpicklingError, EOFError, OSError, RuntimeError, MemoryError, zipfile.BadZipFile),
    *(AttributeError, ImportError, LookupError, TypeError, ValueError, OverflowError, AssertionError),
)
"""Everything that readers of pickles raise when the bytes are cut or damaged."""

REMEDY = "Write the file anew without it."


def load_pickle(data: bytes, *, where: str | Path, tolerant: bool = False, remedy: str = REMEDY) -> Any:
    """Return the object of a pickle.

    Args:
        data: the whole pickle.
        where: the file that it comes from, for errors.
        tolerant: objects of classes that are not on the list become placeholders instead of an error.
        remedy: last sentence of the error about such objects.

    Raises:
        DataError: the bytes are damaged, or ask for something that is not on the list.
    """
    with _as_data_error(where, data, remedy):
        return (_Tolerant if tolerant else _Strict)(io.BytesIO(data)).load()


def load_torch(data: bytes, *, where: str | Path, tolerant: bool = False, remedy: str = REMEDY) -> Any:
    """Return what ``torch.save`` wrote, tensors on the CPU; arguments and errors as for :func:`load_pickle`."""
    import torch

    kind = _Tolerant if tolerant else _Strict
    module: Any = SimpleNamespace(
        Unpickler=kind, load=lambda file, **options: kind(file, **options).load(), __name__="pickle"
    )
    with _as_data_error(where, data, remedy):
        if (
            data[:4] == b"PK\x03\x04"
            and "constants.pkl" in torch._C.PyTorchFileReader(io.BytesIO(data)).get_all_records()
        ):
            raise _RefusedError("a TorchScript program")  # torch.load would hand it to its interpreter
        # From memory: a real file might be an old tar archive, which torch unpacks into a folder.
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False, pickle_module=module, mmap=False)


def read_torch_file(path: Path, *, remedy: str = REMEDY) -> Any:
    """Return the content of a file that ``torch.save`` wrote; see :func:`load_torch`.

    Raises:
        DataError: the file cannot be read, is damaged, or asks for something that is not on the list.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}).") from error
    return load_torch(data, where=path, remedy=remedy)


@contextmanager
def _as_data_error(where: str | Path, data: bytes, remedy: str) -> Iterator[None]:
    """Make a DataError of what readers of pickles raise."""
    try:
        yield
    except _RefusedError as error:
        raise DataError(
            f"{where} holds {error}, and reading that could run code of whoever wrote the file; only plain data, "
            f"arrays and tensors are read. {remedy}"
        ) from None
    except DAMAGE as error:
        reason = " ".join(str(error).split())[:200]
        raise DataError(
            f"{where} ({len(data)} bytes) is cut or damaged ({type(error).__name__}: {reason}); copy it again."
        ) from error


class _RefusedError(Exception):
    """A pickle asks for something that is not on the list."""


class Placeholder:
    """Placeholder of an object whose class is not on the list; accepts every pickle operation and keeps nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Placeholder:
        return Placeholder()

    def __setstate__(self, state: Any) -> None: ...

    def __setitem__(self, key: Any, value: Any) -> None: ...

    def append(self, item: Any) -> None:
        """Take an item of a list."""

    def extend(self, items: Any) -> None:
        """Take items of a list."""

    def add(self, item: Any) -> None:
        """Take an item of a set."""


class _Strict(pickle.Unpickler):
    """Refuses names that are not on the list, and changes of what they mean.

    A pickle may set attributes of all that it has on its stack, classes and functions too.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._given: dict[int, tuple[Any, dict[str, Any]]] = {}

    def load(self) -> Any:
        """Return the object; what the pickle changed outside of it is put back, and refused."""
        try:
            return super().load()
        finally:
            changed = [thing for thing, before in self._given.values() if _put_back(thing, before)]
            if changed:
                raise _RefusedError(f"a change of {getattr(changed[0], '__qualname__', changed[0])!s}")

    def find_class(self, module: str, name: str) -> Any:
        """Return what a name on the list means."""
        meaning = self._meaning(module, name)
        if id(meaning) not in self._given:
            members: list[Any] = list(meaning) if isinstance(meaning, enum.EnumMeta) else []
            for thing in (meaning, *members):
                self._given[id(thing)] = thing, _attributes(thing)
        return meaning

    def _meaning(self, module: str, name: str) -> Any:
        module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
        if module == "_codecs" and name == "encode":
            return _encode
        if name in DATA_TYPES.get(module, ()):
            return getattr(importlib.import_module(module), name)
        if module.split(".")[0] == "torch" and f"{module}.{name}" in _torch_names():
            return _torch_names()[f"{module}.{name}"]
        return self._unlisted(module, name)

    def _unlisted(self, module: str, name: str) -> Any:
        raise _RefusedError(f"{module}.{name}")


class _Tolerant(_Strict):
    """Puts placeholders where names are not on the list."""

    def _unlisted(self, module: str, name: str) -> Any:
        return type(name.split(".")[-1], (Placeholder,), {"__module__": module})


_OF_FUNCTIONS = ("__code__", "__defaults__", "__kwdefaults__")


def _attributes(thing: Any) -> dict[str, Any]:
    """Return the attributes of a class, a function or a member of an enumeration that may be set."""
    own = dict(vars(thing)) if hasattr(thing, "__dict__") else {}
    return own | {name: getattr(thing, name) for name in _OF_FUNCTIONS if hasattr(thing, name)}


def _put_back(thing: Any, before: dict[str, Any]) -> bool:
    """Give a class or a function the attributes that it had; return True when one was another."""
    now = _attributes(thing)
    changed = [name for name in now.keys() | before.keys() if now.get(name, before) is not before.get(name, now)]
    for name in changed:
        if isinstance(thing, type) or name in _OF_FUNCTIONS:
            setattr(thing, name, before[name]) if name in before else delattr(thing, name)
        elif name in before:
            vars(thing)[name] = before[name]
        else:
            del vars(thing)[name]
    return bool(changed)


def _encode(text: str, encoding: str = "latin1") -> bytes:
    """Return bytes that a pickle of protocol 2 holds as text."""
    if encoding.lower().replace("-", "") not in ("latin1", "utf8", "ascii"):
        raise _RefusedError(f"text in the encoding {encoding[:40]!r}")
    return text.encode(encoding)


@functools.cache
def _torch_names() -> dict[str, Any]:
    """Return what torch lets a file of weights use: storages, dtypes, and the functions that rebuild tensors."""
    from torch._weights_only_unpickler import _get_allowed_globals

    return dict(_get_allowed_globals())
