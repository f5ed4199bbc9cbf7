"""Pickles that others wrote, read without running their code.

A pickle names the callables that rebuild its objects, and Python's own reader calls whatever is named, ``os.system``
too.  The readers here know the names in ``pickle_types`` alone.  Any other name is an error; in files of which only a
part is needed it becomes a placeholder, which does nothing.

Beside names, a pickle can set the state of what it has in its hands, and claim lengths.  Here it has in its hands only
what was made in this load, and nothing is longer than the bytes of the file allow.  ``torch.load`` with
``weights_only=True`` is no replacement: it reads protocol 2 alone, its list is one for the whole process, it lets a
state be set on members of enumerations and on numpy's dtypes, and a length of 2**60 is a length to it.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
import zipfile
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from slime.utils import pickle_types
from slime.utils.errors import DataError
from slime.utils.outside_file import read_outside_file
from slime.utils.pickle_types import Recipe, RefusedError, Storage

if TYPE_CHECKING:
    import torch

DAMAGE = (
    *(pickle.UnpicklingError, EOFError, OSError, RuntimeError, MemoryError, zipfile.BadZipFile, struct.error),
    *(AttributeError, ImportError, LookupError, TypeError, ValueError, ArithmeticError, AssertionError),
)
"""Everything that readers of pickles raise when the bytes are cut or damaged."""

REMEDY = "Write the file again without it."
MAX_BYTES = min(64 << 30, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4)
"""Of a file: it is read into memory, and tensors are copied out of it."""
ITEMS_PER_BYTE = 64
"""A pickle may hold one list at several places.  Whoever walks over it then passes the same items again: so often."""
_LEGACY_MAGIC, _LEGACY_VERSION = 0x1950A86A20F9469CFC6C, 1001
_ZIP_MAGIC, _ZIP_HEADER = b"PK\x03\x04", struct.Struct("<26xHH")


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
        return _Reader(_File(data), tolerant=tolerant).load()


def load_torch(data: bytes, *, where: str | Path, tolerant: bool = False, remedy: str = REMEDY) -> Any:
    """Return what ``torch.save`` wrote, tensors on the CPU; arguments and errors as for :func:`load_pickle`."""
    with _as_data_error(where, data, remedy):
        return (_load_zip if data.startswith(_ZIP_MAGIC) else _load_legacy)(data, tolerant)


def read_torch_file(path: Path, *, remedy: str = REMEDY) -> Any:
    """Return the content of a file that ``torch.save`` wrote; see :func:`load_torch`.

    Raises:
        DataError: the file cannot be read, is damaged, or asks for something that is not on the list.
    """
    return load_torch(read_outside_file(path, max_bytes=MAX_BYTES), where=path, remedy=remedy)


@contextmanager
def _as_data_error(where: str | Path, data: bytes, remedy: str) -> Iterator[None]:
    """Make a DataError of what readers of pickles raise."""
    try:
        yield
    except RefusedError as error:
        raise DataError(
            f"{where} holds {error}, and reading that could run code of whoever wrote the file; only plain data, "
            f"arrays and tensors are read. {remedy}"
        ) from None
    except DAMAGE as error:
        reason = " ".join(str(error).split())[:200]
        raise DataError(
            f"{where} ({len(data)} bytes) is cut or damaged ({type(error).__name__}: {reason}); copy it again."
        ) from error


# ------------------------------------------------------------------------------------------ the files of torch.save


def _load_zip(data: bytes, tolerant: bool) -> Any:
    """Return the object of an archive: ``NAME/data.pkl``, and the bytes of storage 0 in ``NAME/data/0``."""
    import torch

    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
    if "constants.pkl" in entries:
        raise RefusedError("a TorchScript program")
    sizes = [entry.file_size for entry in entries.values()]
    is_stored = all(entry.compress_type == zipfile.ZIP_STORED for entry in entries.values())
    if not is_stored or len(sizes) != len(archive.infolist()) or sum(sizes) > len(data):
        raise RefusedError("compressed or overlapping parts, which torch.save does not write")

    def part(name: str) -> memoryview:
        entry = entries[name]
        begin = entry.header_offset + _ZIP_HEADER.size
        begin += sum(_ZIP_HEADER.unpack_from(data, entry.header_offset))
        if begin + entry.file_size > len(data):
            raise EOFError(f"{name} ends after the file")
        return memoryview(data)[begin : begin + entry.file_size]

    if "byteorder" in entries and bytes(part("byteorder")) != b"little":
        raise RefusedError("numbers of a machine of another byte order")
    loaded: dict[str, torch.Tensor] = {}

    def storage(kind: Any, key: str, location: str, num_elements: int) -> Storage:
        if key not in loaded:
            content = bytearray(part(f"data/{key}"))
            loaded[key] = torch.frombuffer(content, dtype=torch.uint8) if content else torch.zeros(0).byte()
        return Storage(loaded[key], kind.value)

    return _Reader(_File(part("data.pkl")), tolerant=tolerant, storage=storage).load()


def _load_legacy(data: bytes, tolerant: bool) -> Any:
    """Return the object of a file of torch before 1.6: five pickles, then length and bytes of each storage."""
    import torch

    loaded: dict[str, torch.Tensor] = {}

    def storage(kind: Any, key: str, location: str, num_elements: int, view: None = None) -> Storage:
        num_bytes = num_elements * kind.value.itemsize
        if view is not None or not 0 <= num_bytes + sum(map(len, loaded.values())) <= len(data):
            raise RefusedError(f"a storage of {num_bytes} bytes")
        if key not in loaded:
            loaded[key] = torch.zeros(num_bytes, dtype=torch.uint8)
            sizes[key] = num_elements
        return Storage(loaded[key], kind.value)

    sizes: dict[str, int] = {}
    file = _File(data)
    if [_Reader(file).load() for _ in range(2)] != [_LEGACY_MAGIC, _LEGACY_VERSION] or not isinstance(
        about := _Reader(file).load(), dict
    ):
        raise pickle.UnpicklingError("torch.save did not write it")
    if not about.get("little_endian", True):
        raise RefusedError("numbers of a machine of another byte order")
    value = _Reader(file, tolerant=tolerant, storage=storage).load()
    for key in _Reader(file).load():
        content = loaded.pop(key)
        if int.from_bytes(file.read(8), "little") != sizes[key] or file.readinto(cast(Any, content.numpy())) != len(
            content
        ):
            raise EOFError(f"the bytes of storage {key} are cut")
    if loaded:
        raise EOFError(f"the bytes of storage {next(iter(loaded))} are missing")
    return value


# ---------------------------------------------------------------------------------------------------- the operations


class _File(io.BytesIO):
    """Bytes that end with an error: Python's reader takes what there is."""

    def read(self, size: int | None = -1) -> bytes:
        """Return as many bytes as are asked for."""
        data = super().read(size)
        if size is not None and len(data) < size:
            raise EOFError(f"{size} bytes are named, and {len(data)} are left")
        return data


class Placeholder:
    """Placeholder of an object whose class is not on the list; accepts every pickle operation and keeps nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __setitem__(self, key: Any, value: Any) -> None: ...

    def append(self, item: Any) -> None:
        """Take an item of a list."""

    def extend(self, items: Any) -> None:
        """Take items of a list."""

    def add(self, item: Any) -> None:
        """Take an item of a set."""


def _is_placeholder(recipe: Any) -> bool:
    return isinstance(recipe, Recipe) and isinstance(recipe.new, type) and issubclass(recipe.new, Placeholder)


_PythonReader: Any = pickle._Unpickler


class _Reader(_PythonReader):
    """Python's reader in Python, whose operations can be replaced; that in C fills memory for an index in six bytes.

    Args:
        file: the pickle.
        tolerant: see :func:`load_pickle`.
        storage: returns the bytes under a tensor by what ``torch.save`` wrote of them.
    """

    def __init__(self, file: _File, *, tolerant: bool = False, storage: Callable[..., Storage] | None = None) -> None:
        super().__init__(file, encoding="utf-8")
        self._tolerant, self._storage, self._num_bytes = tolerant, storage, len(file.getbuffer())

    def load(self) -> Any:
        """Return the object."""
        value = super().load()
        if _num_items(value, {}) > max(self._num_bytes, 1 << 16) * ITEMS_PER_BYTE:
            raise RefusedError("lists that hold one another so often that they have no end")
        return value

    def find_class(self, module: str, name: str) -> Any:
        """Return the recipe that stands for a name."""
        module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
        found = pickle_types.find(module, name)
        if found is not None:
            return found
        if not self._tolerant:
            raise RefusedError(f"{module}.{name}")
        kind = type(name.split(".")[-1], (Placeholder,), {"__module__": module})
        return Recipe(f"{module}.{name}", call=kind, new=kind)

    def persistent_load(self, what: Any) -> Storage:
        """Return the bytes under a tensor."""
        is_storage = isinstance(what, tuple) and what[:1] == ("storage",) and isinstance(what[1], Recipe)
        if self._storage is None or not is_storage:
            raise RefusedError(f"a reference to {str(what)[:80]}")
        return self._storage(*what[1:])

    def _call(self) -> None:
        arguments = self.stack.pop()
        self.stack[-1] = self._made(self.stack[-1], lambda recipe: recipe.call, arguments)

    def _new(self) -> None:
        arguments = self.stack.pop()
        self.stack[-1] = self._made(self.stack[-1], lambda recipe: recipe.new, arguments)

    def _new_with_keywords(self) -> None:
        keywords = self.stack.pop()
        if keywords and not _is_placeholder(self.stack[-2]):
            raise RefusedError("an object made with keywords")
        self._new()

    def _made(self, recipe: Any, way: Callable[[Recipe], Any], arguments: Any) -> Any:
        if isinstance(recipe, Placeholder):
            return Placeholder()
        make = way(recipe) if isinstance(recipe, Recipe) else None
        if make is None:
            raise RefusedError(f"a call of {getattr(recipe, 'name', type(recipe).__name__)}")
        return make(*arguments)

    def _fill(self) -> None:
        state = self.stack.pop()
        thing = self.stack[-1]
        if isinstance(thing, Placeholder):
            return
        if (filled := pickle_types.fill(thing, state)) is not thing:
            self.stack[-1] = filled
            self.memo: dict[int, Any] = {
                index: filled if value is thing else value for index, value in self.memo.items()
            }

    def _byte_array(self) -> None:
        (length,) = struct.unpack("<Q", self.read(8))
        self.append(bytearray(self.read(length)))

    def _refuse(self) -> None:
        raise RefusedError("an operation that pickles of data do not use")

    dispatch = {
        **_PythonReader.dispatch,
        pickle.REDUCE[0]: _call,
        pickle.NEWOBJ[0]: _new,
        pickle.NEWOBJ_EX[0]: _new_with_keywords,
        pickle.BUILD[0]: _fill,
        pickle.BYTEARRAY8[0]: _byte_array,
        **dict.fromkeys(
            (code[0] for code in (pickle.INST, pickle.OBJ, pickle.EXT1, pickle.EXT2, pickle.EXT4)), _refuse
        ),
        **dict.fromkeys((code[0] for code in (pickle.PERSID, pickle.NEXT_BUFFER, pickle.READONLY_BUFFER)), _refuse),
    }


_ATOMS = frozenset({str, int, float, bool, type(None), bytes})


def _num_items(value: Any, known: dict[int, int]) -> int:
    """Return the number of items that a walk passes, those of a list at two places twice; a list in itself ends it."""
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
