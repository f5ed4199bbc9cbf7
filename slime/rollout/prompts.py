"""Converts rows to prompts (messages, text, tokens), and checks prompt files before a job starts.

Nothing is skipped silently: ``check_prompt_file`` finds rows with missing keys or unusable values and names the file
and line before any GPU is reserved.
"""

from __future__ import annotations

import heapq
import re
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from slime.rollout.prompt_files import (
    FILES_ALONE,
    check_grader,
    check_label,
    check_prompt,
    checked_file,
    parquet_columns,
    parse_metadata,
    parse_tools,
    read_rows,
    split_path,
)
from slime.utils.chat_template import apply_chat_template
from slime.utils.errors import DataError

T = TypeVar("T")
R = TypeVar("R")
Row = tuple[str, list[dict[str, Any]] | str, dict[str, Any]]
"""(name of the row for errors, messages or text, extra arguments of the chat template)"""

MAX_LONG_PROMPTS = 8
"""Prompts of a data set whose tokens are counted before the job starts."""
RENDER_TIMEOUT_S = 60.0
POLL_INTERVAL_S = 0.5
TEMPLATE_OVERDUE = (
    "the chat template is still rendering after {:.0f} s; a loop in it may never end. Fix the template of "
    "--hf-checkpoint (chat_template.jinja), or the row."
)
TOKENIZER_OVERDUE = (
    "the tokenizer is still running after {:.0f} s; one of its regular expressions may never end. Fix tokenizer.json "
    "of --hf-checkpoint, or the row."
)


def as_messages(prompt: Any, where: str) -> list[dict[str, Any]]:
    """Return chat messages: a string becomes one user message, and messages stay as they are.

    Raises:
        DataError: the prompt is neither.
    """
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    check_prompt(prompt, where)
    return [dict(message) for message in prompt]


def render(
    tokenizer: Any, messages: list[dict[str, Any]], tools: list[Any] | None, where: str, /, **kwargs: Any
) -> str:
    """Render messages as text with the tokenizer's chat template, up to where the response begins.

    ``kwargs`` are passed to the template and override the other arguments: ``tools=None`` offers no tools, for a model
    that was trained with its own.

    Raises:
        DataError: see ``apply_chat_template``.
    """
    return apply_chat_template(tokenizer, messages, where, **{"tools": tools, "add_generation_prompt": True} | kwargs)


class TemplateCheck:
    """Collects rows of a data set to test its chat template on: the first row, and the first row with each role."""

    def __init__(self, kwargs: Mapping[str, Any], rows: list[Row]) -> None:
        self._kwargs = {"add_generation_prompt": True, **kwargs}
        self._rows = rows
        self._seen: set[str] = set()

    def needs(self, prompt: Any) -> bool:
        """Return True if the prompt has a role that no earlier prompt had."""
        return not _roles(prompt) <= self._seen

    def add(self, messages: list[dict[str, Any]], tools: list[Any] | None, where: str) -> None:
        """Add a row to test the template on."""
        self._seen |= _roles(messages)
        self._rows.append((where, messages, {"tools": tools, **self._kwargs}))


@dataclass(frozen=True)
class PromptLimit:
    """The longest prompt for which an engine has room."""

    tokens: int
    why: str
    """Where the limit comes from, for errors."""
    flag: str
    """Flag that leaves out longer prompts."""
    leaves_out_above: int | None
    """Value of ``flag``."""

    def check(self, where: str, num_tokens: int) -> None:
        """Raise DataError if a prompt of ``num_tokens`` tokens is used and does not fit."""
        if self.tokens < num_tokens <= (self.leaves_out_above or num_tokens):
            raise DataError(
                f"{where}: the prompt has {num_tokens} tokens, and at most {self.tokens} fit: {self.why}. "
                f"{self.flag} {self.tokens} leaves out longer prompts."
            )


class LengthCheck:
    """Collects the prompts of a data set with the most bytes, to count their tokens.

    A token takes at least one byte, so a prompt with fewer bytes than the limit is known to fit.  Of more than
    ``MAX_LONG_PROMPTS`` longer ones the rest are left to the engine.
    """

    def __init__(self, limit: PromptLimit, kwargs: Mapping[str, Any] | None) -> None:
        """Collect nothing yet.

        Args:
            limit: What the prompts must fit into.
            kwargs: Arguments of the chat template; None if prompts are text.
        """
        self.limit, self._kwargs = limit, kwargs
        self._longest: list[tuple[int, int, Row]] = []
        self._num_seen = 0

    def add(self, prompt: list[dict[str, Any]] | str, tools: list[Any] | None, where: str) -> None:
        """Keep the prompt if it is among the longest of those that may not fit."""
        if (size := _num_bytes(prompt)) <= self.limit.tokens:
            return
        self._num_seen += 1
        kwargs = {} if self._kwargs is None else {"tools": tools, "add_generation_prompt": True, **self._kwargs}
        heapq.heappush(self._longest, (size, self._num_seen, (where, prompt, kwargs)))
        if len(self._longest) > MAX_LONG_PROMPTS:
            heapq.heappop(self._longest)

    @property
    def rows(self) -> list[Row]:
        """The collected prompts, in the order of the file."""
        return [row for _, _, row in sorted(self._longest, key=lambda one: one[1])]


def _num_bytes(prompt: Any) -> int:
    """Return the UTF-8 length of a prompt's text."""
    if isinstance(prompt, str):
        return len(prompt.encode(errors="surrogatepass"))
    if isinstance(prompt, Mapping):
        return _num_bytes(prompt.get("content") or prompt.get("text") or "")
    return sum(map(_num_bytes, prompt)) if isinstance(prompt, Sequence) else 0


def _roles(prompt: Any) -> set[str]:
    return {"user"} if isinstance(prompt, str) else {message["role"] for message in prompt}


def encode(tokenizer: Any, text: str, where: str = "A prompt") -> list[int]:
    """Return the tokens of a rendered text.

    Raises:
        DataError: the tokenizer crashes or does not finish.
    """
    rows = [(where, text)]
    [ids] = map_with_deadline(
        lambda _, row: tokenizer.encode(row, add_special_tokens=False), rows, overdue=TOKENIZER_OVERDUE
    )
    return list(ids)


def map_with_deadline(
    work: Callable[[str, R], T],
    rows: Iterable[tuple[str, R]],
    *,
    timeout_s: float = RENDER_TIMEOUT_S,
    overdue: str = TEMPLATE_OVERDUE,
) -> list[T]:
    """Return ``work(where, row)`` for each row, with a deadline: a template or tokenizer may never end.

    Args:
        work: Runs in a thread, which is abandoned at the deadline because nothing can interrupt it.
        rows: Iterated in that thread too.
        timeout_s: Seconds per row.
        overdue: Error text for a row that takes longer, with a placeholder for ``timeout_s``.

    Raises:
        DataError: a row took longer, or crashed the tokenizer.
    """
    done: list[T] = []
    failure: list[BaseException] = []
    current: tuple[str, float] | None = None

    def serve() -> None:
        nonlocal current
        try:
            for where, row in rows:
                current = where, time.monotonic()
                done.append(work(where, row))
                current = None
        except BaseException as error:  # re-raised in the caller's thread
            failure.append(error)

    thread = threading.Thread(target=serve, name="slime-chat-template", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(POLL_INTERVAL_S)
        at_work = current
        if at_work is not None and time.monotonic() - at_work[1] > timeout_s and thread.is_alive():
            raise DataError(f"{at_work[0]}: {overdue.format(timeout_s)}")
    if (
        failure and current is not None and type(failure[0]).__name__ == "PanicException"
    ):  # raised by Rust code; a BaseException
        raise DataError(
            f"{current[0]}: the tokenizer breaks on it ({failure[0]}). Correct the row, or fix tokenizer.json of "
            "--hf-checkpoint."
        ) from failure[0]
    if failure:
        raise failure[0]
    return done


def insert_multimodal(
    messages: list[dict[str, Any]], row: Mapping[str, Any], multimodal_keys: Mapping[str, str], where: str
) -> list[dict[str, Any]]:
    """Replace each placeholder in the messages by the row's next item of that kind.

    Args:
        messages: Chat messages; only string contents are searched.
        row: The data row.
        multimodal_keys: Kind (``image``) -> key of the row that lists the items.
        where: Name of the row, for errors.

    Returns:
        New messages.  ``"a <image> b"`` becomes ``[{"type": "text", "text": "a "}, {"type": "image", "image": item},
        {"type": "text", "text": " b"}]``; items that are dicts with a ``type`` are inserted unchanged.

    Raises:
        DataError: a kind is unknown, or the numbers of placeholders and items differ.
    """
    from slime.utils.types import MultimodalTypes

    kinds = {}
    waiting: dict[str, list[Any]] = {}
    for name, key in multimodal_keys.items():
        kind = MultimodalTypes.get(name)
        if kind is None:
            allowed = ", ".join(known.name for known in MultimodalTypes.all())
            raise DataError(f"--multimodal-keys has the kind {name!r}; it must be one of {allowed}.")
        kinds[kind.placeholder] = kind.name
        items: Any = row.get(key)
        if hasattr(items, "tolist"):
            items = items.tolist()
        waiting[kind.name] = list(items) if isinstance(items, (list, tuple)) else [] if items is None else [items]
    pattern = re.compile("(" + "|".join(re.escape(mark) for mark in kinds) + ")")

    def part(piece: str) -> dict[str, Any]:
        if piece not in kinds:
            return {"type": "text", "text": piece}
        kind = kinds[piece]
        if not waiting[kind]:
            raise DataError(f"{where}: the prompt has more {piece} than the row has items of kind {kind}.")
        item = waiting[kind].pop(0)
        return item if isinstance(item, dict) and "type" in item else {"type": kind, kind: item}

    filled = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, str):
            content = [part(piece) for piece in pattern.split(content) if piece]
        filled.append({**message, "content": content})
    left = {kind: len(items) for kind, items in waiting.items() if items}
    if left:
        raise DataError(f"{where}: items without a placeholder in the prompt: {left}.")
    return filled


def check_prompt_file(
    path: str,
    input_key: str,
    *,
    label_key: str | None = None,
    tool_key: str | None = None,
    metadata_key: str = "metadata",
    multimodal_keys: Mapping[str, str] | None = None,
    some_keys: Mapping[str, str] | None = None,
    grader: str | None = None,
    rm_types: Collection[str] | None = None,
    template: TemplateCheck | None = None,
    lengths: LengthCheck | None = None,
    flag: str = "--prompt-data",
    input_flag: str = "--input-key",
    label_flag: str = "--label-key",
    readers: Mapping[str, str] = FILES_ALONE,
) -> int:
    """Check that every selected row decodes and holds what the run needs; return the number of rows.

    Args:
        path: .jsonl or .parquet file, optionally followed by a row range ``@[a:b]``.
        input_key: Key that every row must have.
        label_key: Key that every row must have; None if the run needs no labels.
        tool_key, metadata_key: Optional keys of a row.
        multimodal_keys: Kind -> key.  Rows without such items may omit the key.
        some_keys: Key -> its flag.  At least one row must have each key.
        grader: Built-in grader of rows that do not name one; None if something else judges the label.
        rm_types: Graders that rows may name; None if the run does not read these names.
        template: Collects the rows to test the chat template on; None skips this.
        lengths: Collects the longest prompts; None skips this.
        flag, input_flag, label_flag: Flag names, for errors.
        readers: Path prefix -> import path of a :data:`~slime.rollout.prompt_files.Reader`, for data sets that are not
            files.

    Raises:
        DataError: names the file, the line and the problem.
    """
    is_file = not path.startswith(tuple(readers))
    file, rows = checked_file(path, flag) if is_file else (Path(path), split_path(path)[1])
    required = {input_key: input_flag} | ({label_key: label_flag} if label_key else {})
    columns = {*required, *(some_keys or ()), metadata_key, tool_key or ""}
    unseen, first = dict(some_keys or {}), list[str]()
    if is_file and file.suffix == ".parquet":
        first, unseen = parquet_columns(file), {}
        check_keys(first, {**required, **(some_keys or {})}, f"{file} (its columns)")
        columns |= set((multimodal_keys or {}).values())
    num_rows = 0
    for where, row in read_rows(path, flag, columns=columns, readers=readers):
        check_keys(row, required, where)
        check_prompt(row[input_key], where)
        metadata = parse_metadata(row.get(metadata_key), where)
        tools = parse_tools(row.get(tool_key), where) if tool_key else None
        if rm_types is not None:
            check_grader(metadata, where, rm_types)
        if label_key:
            check_label(row[label_key], where, f"{label_key} ({label_flag})", metadata.get("rm_type") or grader)
        if multimodal_keys and multimodal_keys.values() & row.keys():
            _check_images(normalised_prompt(row, input_key, multimodal_keys, True, where), where)
        if template is not None and template.needs(row[input_key]):
            template.add(normalised_prompt(row, input_key, multimodal_keys, True, where), tools, where)
        if lengths is not None:
            lengths.add(normalised_prompt(row, input_key, None, template is not None, where), tools, where)
        unseen = {key: name for key, name in unseen.items() if key not in row}
        first = first or list(row)
        num_rows += 1
    if num_rows == 0:
        is_empty = file.is_file() and file.stat().st_size == 0
        content = "the file is empty" if is_empty else f"rows {rows.start or 0}:{rows.stop or ''}"
        raise DataError(f"{path} selects no row ({content}); {flag} needs at least one.")
    if unseen:
        key, name = next(iter(unseen.items()))
        raise DataError(f"No row of {path} has the key {key!r}, which {name} names; row 1 has {', '.join(first)}.")
    return num_rows


def check_keys(row: Mapping[str, Any] | Sequence[str], required: Mapping[str, str], where: str) -> None:
    """Raise DataError if the row lacks a key of ``required``, which maps keys to the flags that name them."""
    for key, flag in required.items():
        if key not in row:
            raise DataError(f"{where} has no key {key!r}, which {flag} names; it has {', '.join(row) or 'none'}.")


def normalised_prompt(
    row: Mapping[str, Any],
    prompt_key: str,
    multimodal_keys: Mapping[str, str] | None,
    apply_chat_template: bool,
    where: str,
) -> Any:
    """Return the prompt of a row.  Text stays text unless a chat template or multimodal items require messages."""
    prompt = row[prompt_key]
    check_prompt(prompt, where)
    if isinstance(prompt, str) and not apply_chat_template and not multimodal_keys:
        return prompt
    messages = as_messages(prompt, where)
    return insert_multimodal(messages, row, multimodal_keys, where) if multimodal_keys else messages


def _check_images(prompt: list[dict[str, Any]], where: str) -> None:
    """Decode a row's local images; images behind URLs are fetched when the job reads its data.

    Raises:
        DataError: an image cannot be used; the error names the row.
    """
    from slime.utils.processing_utils import image_sources, open_image

    try:
        for source in image_sources(prompt):
            if not str(source)[:8].lower().startswith(("http://", "https://")):
                open_image(source)
    except DataError as error:
        raise DataError(f"{where}: {error}") from error
