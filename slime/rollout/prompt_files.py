"""Reads rows from .jsonl and .parquet prompt files, each with its location for errors, and checks their values.

``path@[a:b]`` selects rows like a Python slice.  Nothing is skipped silently: a line that does not decode ends the run
with an error that names the file and line.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import reprlib
import sys
from argparse import Namespace
from collections.abc import Callable, Collection, Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any
from urllib.parse import parse_qsl

from slime.flags.reward import BOXED_PREFIX, GRADERS_WITH_LABEL, GRADERS_WITH_LABELS
from slime.utils.chat_template import template_messages
from slime.utils.errors import DataError
from slime.utils.files import similar_path
from slime.utils.misc import load_function

SUFFIXES = (".jsonl", ".parquet")
MAX_LINE_BYTES = 256 << 20
MAX_DEPTH = 64
"""Maximum nesting depth of a row.  Copying or pickling a sample fails at a few hundred levels."""

Reader = Callable[[str, slice, str], Iterator[tuple[str, dict[str, Any]]]]
"""Called with ``(path, rows, flag)`` for a path with a registered prefix; yields the items of ``read_rows``."""
FILES_ALONE: Mapping[str, str] = MappingProxyType({})

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
"""First bytes of files that are named .jsonl but have another format."""

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = 70
_repr.maxlevel = 3


def short(value: Any) -> str:
    """Return a value's repr for an error, cut to 80 characters; handles large and deeply nested values."""
    text = _repr.repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def split_path(path: str) -> tuple[str, slice]:
    """Split ``"data.jsonl@[0:100]"`` into ``("data.jsonl", slice(0, 100))``; no suffix selects all rows."""
    match = _SLICED.match(path)
    if match is None:
        return path, slice(None)
    bounds = [match[name] for name in ("start", "stop")]
    start, stop = (_bound(text) if text.strip("-") else None for text in bounds)
    return match["path"], slice(start, stop)


def _bound(text: str) -> int:
    """Parse a row number; one with more than 18 characters is clamped to ``sys.maxsize``."""
    return int(text[:20]) if len(text) <= 18 else (-sys.maxsize if text.startswith("-") else sys.maxsize)


def parse_query(path: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the values of ``PREFIX:NAME?key=value&...``; values that are not JSON stay text."""
    name, _, query = path.partition(":")[2].partition("?")
    return name, {key: _value(text) for key, text in parse_qsl(query, keep_blank_values=True)}


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def readers_of(args: Namespace) -> Mapping[str, str]:
    """Return path prefix -> import path of a :data:`Reader`, for data sets that are not files."""
    readers: Mapping[str, str] = vars(args).get("prompt_readers", FILES_ALONE)
    return readers


def read_rows(
    path: str,
    flag: str = "--prompt-data",
    *,
    columns: Collection[str] | None = None,
    readers: Mapping[str, str] = FILES_ALONE,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield ``(where, row)`` for each selected row.

    ``where`` names the row in errors: ``"<file> line <n>"``, or ``"<file> row <n>"`` for parquet, counted from 1.

    Args:
        path: .jsonl or .parquet file, or a path with the prefix of a reader, optionally followed by ``@[a:b]``.
        flag: Flag that gave the path, for errors.
        columns: Columns of a parquet file to read; missing ones are ignored.  None reads all.
        readers: Path prefix -> import path of a :data:`Reader`.

    Raises:
        DataError: the file is missing or has another format, or a selected row cannot be decoded.
    """
    for prefix, reader in readers.items():
        if path.startswith(prefix):
            read: Reader = load_function(reader)
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
    """Return the file and the row range that a path names.

    Raises:
        DataError: the file does not exist, or does not end in .jsonl or .parquet.
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
        raise DataError(f"{flag} is {path!r}, but there is no file {file.absolute()}.{similar_path(file)}")
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
    """Parse a JSON text.

    Raises:
        ValueError: the text is not JSON, repeats a key in one object, has an integer with thousands of digits, or is
            nested deeper than ``MAX_DEPTH`` levels.
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
    r"""Refuse a lone surrogate such as ``\\ud83d``, which no tokenizer or file accepts."""
    for key, value in row.items():
        try:
            json.dumps([key, value], ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"{where}: {short(key)} is {short(value)}, with half of a surrogate pair "
                f"({ascii(error.object[error.start])}), which is not a character; write both halves, or remove it."
            ) from error


# Rows


def without_absent(value: Any) -> Any:
    """Recursively remove null fields from a value of an Arrow table.

    All structs of an Arrow column share one schema, so fields that a row did not have (a parameter of another tool, an
    argument of another call) are null.  Two kinds of null are kept: a message's ``content``, which is null beside tool
    calls, and the path of an image.
    """
    if isinstance(value, dict) and value.keys() != {"bytes", "path"}:
        stays = "content" if isinstance(value.get("role"), str) else None
        return {key: without_absent(item) for key, item in value.items() if item is not None or key == stays}
    return [without_absent(item) for item in value] if isinstance(value, list) else value


def _select(numbered: Iterator[Any], rows: slice) -> Iterator[Any]:
    """Return the items of a slice, as a stream unless a bound is negative."""
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


# Checks of a row's values: prompt, label, metadata and tools.

MAX_PROMPT_CHARS = 4_000_000
"""About a million tokens.  Tokenizers take minutes or longer for much longer prompts."""


def check_prompt(prompt: Any, where: str) -> None:
    """Check that a prompt is text or a non-empty list of messages, and is not blank.

    Raises:
        DataError: the prompt is anything else, is blank, or is longer than ``MAX_PROMPT_CHARS``.
    """
    if isinstance(prompt, str):
        if _is_blank(prompt):
            raise DataError(
                f"{where}: the prompt is {short(prompt)}, which is blank; it must be text or a list of chat messages. "
                "Fill it in, or remove the row."
            )
        num_chars = len(prompt)
    elif isinstance(prompt, list) and prompt:
        places = (f"{where}: message {number} of the prompt" for number in itertools.count())
        num_chars = sum(map(_check_message, prompt, places))
        if all(_says_nothing(message) for message in prompt if message["role"] != "system"):
            raise DataError(f"{where}: the prompt is {short(prompt)}, which is blank. Fill it in, or remove the row.")
    else:
        raise DataError(f"{where}: the prompt is {short(prompt)}; it must be text or a list of chat messages.")
    if num_chars > MAX_PROMPT_CHARS:
        raise DataError(
            f"{where}: the prompt has {num_chars:,} characters ({short(prompt)}); at most {MAX_PROMPT_CHARS:,} are "
            "tokenized. Shorten it, or remove the row."
        )


def _check_message(message: Any, where: str) -> int:
    """Check one message; return the number of characters of its text."""
    if not isinstance(message, Mapping) or "role" not in message:
        raise DataError(f"{where} is {short(message)}; it must have a role.")
    role, content = message["role"], message.get("content")
    if not isinstance(role, str) or _is_blank(role):
        raise DataError(
            f"{where} has the role {short(role)}; a role is a word such as user, assistant, system or tool."
        )
    if not isinstance(message.get("tool_calls"), list | None):
        raise DataError(f"{where} has the tool_calls {short(message['tool_calls'])}; they are a list of objects.")
    try:
        template_messages([message])
    except ValueError as error:
        raise DataError(f"{where}: {error}. Write an object such as {{...}}, or JSON text of one.") from error
    if isinstance(content, str):
        return len(content)
    if isinstance(content, list):
        if wrong := [part for part in content if not _is_part(part)]:
            raise DataError(
                f"{where} has the part {short(wrong[0])}; a part of a content is text, or an object such as "
                '{"type": "text", "text": ...}.'
            )
        return sum(len(part) if isinstance(part, str) else len(str(part.get("text") or "")) for part in content)
    is_asked = role in ("user", "system")
    others = {key for key, value in message.items() if value is not None} - {"role", "name"}
    if content is None and others and not (is_asked and "content" in message):
        return 0  # tool calls, or fields that a custom template reads
    if content is None or not isinstance(content, Mapping) or is_asked:
        raise DataError(
            f"{where} has the content {short(content)}; it must be text, or a list of parts such as "
            '{"type": "text", "text": ...}.'
        )
    return 0


def _is_part(part: Any) -> bool:
    if not isinstance(part, Mapping):
        return isinstance(part, str)
    return isinstance(part.get("text"), str if part.get("type") == "text" else str | None)


def _says_nothing(message: Mapping[str, Any]) -> bool:
    content = message.get("content")
    if isinstance(content, str):
        return _is_blank(content)
    if content is None:
        return not any(message[key] for key in message.keys() - {"role", "name"})
    return not content


def _is_blank(text: str) -> bool:
    return not any(char.isprintable() and not char.isspace() for char in text)


def check_label(label: Any, where: str, name: str, grader: Any = None) -> None:
    """Check that a label is finite, and that it is text or a number if a built-in grader compares answers with it.

    Args:
        label: Label of the row.
        where: Name of the row, for errors.
        name: Column and flag of the label, for errors.
        grader: ``rm_type`` of the row; None if something else judges answers.

    Raises:
        DataError: the label is unusable.
    """
    parts = label if isinstance(label, list | tuple) else [label]
    if any(isinstance(part, float | Decimal) and not math.isfinite(part) for part in parts):
        raise DataError(
            f"{where}: {name} is {short(label)}, which no answer equals; a label is text, a finite number, or null "
            "where the reward needs none. Fill it in, or remove the row."
        )
    grader = grader.removeprefix(BOXED_PREFIX) if isinstance(grader, str) else None
    if grader not in GRADERS_WITH_LABEL:
        return
    is_list = isinstance(label, list | tuple)
    is_allowed = parts and (not is_list or grader in GRADERS_WITH_LABELS)
    if not is_allowed or any(not _is_answer(part) for part in parts):
        value = "null" if label is None else short(label)
        raise DataError(
            f"{where}: {name} is {value}, and --rm-type {grader} compares answers with it, so it must be text or a "
            "number; name another column, or fill it in."
        )


def check_grader(metadata: Mapping[str, Any], where: str, allowed: Collection[str]) -> None:
    """Check that the ``rm_type`` in a row's metadata, if any, is a built-in grader.

    Raises:
        DataError: the grader does not exist.
    """
    name = metadata.get("rm_type") or ""
    if name and (not isinstance(name, str) or name.strip().removeprefix(BOXED_PREFIX) not in allowed):
        raise DataError(
            f"{where}: rm_type in its metadata is {short(name)}; it may be {', '.join(allowed)}, each also with the "
            f"prefix {BOXED_PREFIX}. Correct the row, or give --custom-rm-path."
        )


def _is_answer(value: Any) -> bool:
    if isinstance(value, str):
        return not _is_blank(value)
    return isinstance(value, int | float | Decimal) and not isinstance(value, bool)


def parse_tools(value: Any, where: str) -> list[Any] | None:
    """Return the tools of a row, given as a list or as JSON text; None if the row has none."""
    if isinstance(value, str):
        value = parse_json(value, "tools", where) if value.strip() else None
    if value is None:
        return None
    if hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, list):
        raise DataError(f"{where}: tools are {short(value)}; they must be a list, or JSON text of one.")
    if wrong := [tool for tool in value if not _is_tool(tool)]:
        raise DataError(f"{where} has the tool {short(wrong[0])}; a tool is an object that names a function.")
    return value


def _is_tool(tool: Any) -> bool:
    if not isinstance(tool, Mapping):
        return isinstance(tool, str) and not _is_blank(tool)
    function = tool.get("function")
    named = function if isinstance(function, Mapping) else tool
    return isinstance(named.get("name") or (named is tool and named.get("type")), str)


def parse_metadata(value: Any, where: str) -> dict[str, Any]:
    """Return the metadata of a row, given as a dict or as JSON text; {} if the row has none."""
    if isinstance(value, str):
        value = parse_json(value, "metadata", where) if value.strip() else None
    if not value:
        return {}
    if not isinstance(value, Mapping):
        raise DataError(f"{where}: metadata is {short(value)}; it must be an object, or JSON text of one.")
    return dict(value)


def parse_json(text: str, name: str, where: str) -> Any:
    """Parse JSON ``text``; ``name`` and ``where`` are for errors."""
    try:
        return decode_json(text)
    except ValueError as error:
        raise DataError(f"{where}: {name} is text but not JSON ({error}): {short(text)}.") from error
