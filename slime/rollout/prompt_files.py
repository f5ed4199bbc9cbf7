"""Prompt files: rows from .jsonl or .parquet, each with its place for errors.

``path@[a:b]`` selects rows as a Python slice.  Nothing is skipped in silence: a line that does not decode ends the
run, with the file and the line.
"""

from __future__ import annotations

import itertools
import json
import re
import reprlib
import sys
from argparse import Namespace
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any
from urllib.parse import parse_qsl

from slime.utils.errors import DataError
from slime.utils.misc import load_function

SUFFIXES = (".jsonl", ".parquet")
MAX_LINE_BYTES = 256 << 20
MAX_DEPTH = 64
"""Levels of nesting in a row.  A few hundred are beyond what copies and pickles of a sample can follow."""

Reader = Callable[[str, slice, str], Iterator[tuple[str, dict[str, Any]]]]
"""``(path, rows, flag)`` -> what ``read_rows`` yields, for paths with a prefix."""
FILES_ALONE: Mapping[str, Reader] = MappingProxyType({})

_SLICED = re.compile(r"^(?P<path>.+)@\[(?P<start>-?\d*):(?P<stop>-?\d*)\]$")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_FOREIGN = {
    b"\x1f\x8b": "compressed by gzip; decompress it (gunzip)",
    b"\x28\xb5\x2f\xfd": "compressed by zstd; decompress it (unzstd)",
    b"BZh": "compressed by bzip2; decompress it (bunzip2)",
    b"\xfd7zXZ": "compressed by xz; decompress it (unxz)",
    b"PK\x03\x04": "a zip archive; unpack it",
    b"PAR1": "a parquet file; name it .parquet",
    b"\xff\xfe": "text in UTF-16 or UTF-32; write it in UTF-8",
    b"\xfe\xff": "text in UTF-16; write it in UTF-8",
}
"""First bytes of files that are named .jsonl and are something else."""

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = 70
_repr.maxlevel = 3


def short(value: Any) -> str:
    """Return the text of a value for an error, cut to 80 characters; values may be large or nested without end."""
    text = _repr.repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def split_path(path: str) -> tuple[str, slice]:
    """Return ``("data.jsonl", slice(0, 100))`` from ``"data.jsonl@[0:100]"``; every row without the suffix."""
    match = _SLICED.match(path)
    if match is None:
        return path, slice(None)
    bounds = [match[name] for name in ("start", "stop")]
    start, stop = (_bound(text) if text.strip("-") else None for text in bounds)
    return match["path"], slice(start, stop)


def _bound(text: str) -> int:
    """Return the number of a row; one with more digits than a file has rows means its end."""
    return int(text[:20]) if len(text) <= 18 else (-sys.maxsize if text.startswith("-") else sys.maxsize)


def parse_query(path: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the values of ``PREFIX:NAME?key=value&...``; values are JSON, or else text."""
    name, _, query = path.partition(":")[2].partition("?")
    return name, {key: _value(text) for key, text in parse_qsl(query, keep_blank_values=True)}


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def readers_of(args: Namespace) -> dict[str, Reader]:
    """Return prefix -> reader, of data sets that are no files."""
    return {prefix: load_function(path) for prefix, path in vars(args).get("prompt_readers", {}).items()}


def read_rows(
    path: str,
    flag: str = "--prompt-data",
    *,
    columns: Collection[str] | None = None,
    readers: Mapping[str, Reader] = FILES_ALONE,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield ``(where, row)`` for each selected row; ``where`` is ``"<file> line <n>"``, counted from 1, for errors.

    Args:
        path: .jsonl or .parquet, or what begins with the prefix of a reader, maybe with ``@[a:b]``.
        flag: where the path comes from, for errors.
        columns: those of a parquet file to read, as far as it has them; all by default.
        readers: by prefix.

    Raises:
        DataError: the file is missing or of another kind, or a selected row cannot be decoded.
    """
    for prefix, read in readers.items():
        if path.startswith(prefix):
            for where, row in read(*split_path(path), flag):
                yield where, without_absent(row)
            return
    file, rows = checked_file(path, flag)
    if file.suffix == ".parquet":
        for number, row in _select(_read_parquet(file, columns), rows):
            yield f"{file} row {number}", {key: without_absent(value) for key, value in row.items()}
        return
    with _open(file, flag) as lines:
        _check_first_bytes(lines, file, flag)
        filled = ((number, line) for number, line in enumerate(_lines(lines, file), start=1) if line.strip())
        for number, line in _select(filled, rows):
            where = f"{file} line {number}"
            yield where, _decode_line(line, where)


def read_file(path: str) -> Iterator[dict[str, Any]]:
    """Yield the selected rows of a prompt file, as dicts."""
    for _, row in read_rows(path):
        yield row


def checked_file(path: str, flag: str) -> tuple[Path, slice]:
    """Return the file and the rows that a path names.

    Raises:
        DataError: it is not there, or its name says that it is something else.
    """
    name, rows = split_path(path)
    file = Path(name)
    if file.suffix not in SUFFIXES:
        remedy = " Decompress it first." if file.suffix in (".gz", ".bz2", ".xz", ".zst", ".zip") else ""
        raise DataError(
            f"{flag} is {path!r}; the file must end in {' or '.join(SUFFIXES)}, optionally followed by a range of "
            f"rows such as @[0:100].{remedy}"
        )
    if not file.is_file():
        raise DataError(f"{flag} is {path!r}, but there is no file {file.absolute()}.")
    return file, rows


def _open(file: Path, flag: str) -> IO[bytes]:
    try:
        return file.open("rb")
    except OSError as error:
        raise DataError(f"{flag}: {file} cannot be read ({error.strerror}); change its permissions.") from error


def _check_first_bytes(lines: IO[bytes], file: Path, flag: str) -> None:
    start = lines.read(8)
    lines.seek(0)
    for magic, kind in _FOREIGN.items():
        if start.startswith(magic):
            raise DataError(f"{flag}: {file} is named .jsonl and is {kind}, and give {flag} the new file.")


def _lines(lines: IO[bytes], file: Path) -> Iterator[bytes]:
    for number in itertools.count(1):
        line = lines.readline(MAX_LINE_BYTES + 1)
        if not line:
            return
        if len(line) > MAX_LINE_BYTES:
            raise DataError(
                f"{file} line {number} has more than {MAX_LINE_BYTES} bytes; each line of a .jsonl file is one object "
                "of at most that size. Split the file into lines."
            )
        yield line


# JSON


def decode_json(text: str) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: it is not JSON, has a key twice in one object, an integer of thousands of digits, or is nested too
            deeply to be copied.
    """
    try:
        value = _DECODER.decode(text)
    except RecursionError:
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels") from None
    if text.count("[") + text.count("{") > MAX_DEPTH and _depth(value) > MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
    return value


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {short(twice)} occurs twice in one object; keep one of them")
    return values


_DECODER = json.JSONDecoder(object_pairs_hook=_without_repeats)


def _depth(value: Any) -> int:
    depth = 0
    layer = [value]
    while layer:
        inner: list[Any] = []
        for item in layer:
            if isinstance(item, dict):
                inner.extend(item.values())
            elif isinstance(item, list):
                inner.extend(item)
        depth += 1
        layer = inner
    return depth


def _decode_line(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = decode_json(line.decode("utf-8-sig" if line.startswith(b"\xef\xbb\xbf") else "utf-8"))
    except ValueError as error:
        text = short(line[:60].decode(errors="replace").strip())
        cut = "" if line.endswith(b"\n") else " The file ends within this line; it may be cut short."
        reason = str(error).partition("; use sys.")[0]
        raise DataError(
            f"{where} is not JSON ({reason}): {text}.{cut} Each line of a .jsonl file is one object; a file with one "
            "list of objects must be rewritten with one object per line."
        ) from error
    if not isinstance(row, dict):
        raise DataError(f"{where} is a JSON {type(row).__name__}; each line must be an object such as {{...}}.")
    if _SURROGATE.search(line):
        _check_text(row, where)
    return row


def _check_text(row: dict[str, Any], where: str) -> None:
    r"""Refuse half of a surrogate pair, such as ``\\ud83d`` alone: no tokenizer and no file takes it."""
    for key, value in row.items():
        try:
            json.dumps([key, value], ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"{where}: {short(key)} is {short(value)}, with half of a surrogate pair "
                f"({ascii(error.object[error.start])}), which is no character; write both halves, or remove it."
            ) from error


# Rows


def without_absent(value: Any) -> Any:
    """Return a value of an arrow table without the fields that are null, down to the innermost.

    All structs of a column have the fields of every row there, so what a row did not have is null: a parameter of
    another tool, an argument of another call.  Two nulls stay: the content of a message, which stands beside calls,
    and the path of an image.
    """
    if isinstance(value, dict) and value.keys() != {"bytes", "path"}:
        stays = "content" if isinstance(value.get("role"), str) else None
        return {key: without_absent(item) for key, item in value.items() if item is not None or key == stays}
    return [without_absent(item) for item in value] if isinstance(value, list) else value


def _select(numbered: Iterator[Any], rows: slice) -> Iterator[Any]:
    """Return the items of a slice; read as a stream unless a bound counts from the end."""
    if (rows.start or 0) < 0 or (rows.stop or 0) < 0:
        return iter(list(numbered)[rows])
    return itertools.islice(numbered, rows.start, rows.stop)


def parquet_columns(file: Path) -> list[str]:
    """Return the names of the columns of a parquet file."""
    return list(_open_parquet(file).schema_arrow.names)


def _open_parquet(file: Path) -> Any:
    import pyarrow
    import pyarrow.parquet

    try:
        opened = pyarrow.parquet.ParquetFile(file, page_checksum_verification=True)
        names = opened.schema_arrow.names
    except (OSError, ValueError, OverflowError, pyarrow.ArrowException) as error:
        raise DataError(
            f"{file} cannot be read as parquet ({_first_line(error)}); it may be cut short or damaged: get it again."
        ) from error
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise DataError(f"{file} has two columns {twice!r}; rename or drop one of them.")
    return opened


def _read_parquet(file: Path, columns: Collection[str] | None) -> Iterator[tuple[int, dict[str, Any]]]:
    import pyarrow

    opened = _open_parquet(file)
    wanted = None if columns is None else [name for name in opened.schema_arrow.names if name in columns]
    number = 0
    batches = opened.iter_batches(columns=wanted)
    while True:
        try:
            batch = next(batches, None)
            rows = [] if batch is None else batch.to_pylist()
        except (OSError, ValueError, OverflowError, pyarrow.ArrowException) as error:
            raise DataError(
                f"{file} cannot be read from row {number + 1} on ({_first_line(error)}); it may be damaged: get it "
                "again."
            ) from error
        if batch is None:
            return
        for row in rows:
            number += 1
            yield number, row


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].strip(". ")[:200]
