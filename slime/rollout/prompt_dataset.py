"""Prompt data: a file of rows in, one ``Sample`` per row out, its prompt as the model reads it.

Nothing is skipped in silence: a row without its keys, or with values of no use, ends the run, with file and line.
``check_prompt_file`` finds them before any GPU is taken.
"""

from __future__ import annotations

import itertools
import json
import logging
import random
import re
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import xxhash

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
from slime.utils.plugins import said_by
from slime.utils.processing_utils import (
    build_processor_kwargs,
    image_sources,
    open_image,
    process_vision_info,
)
from slime.utils.types import MultimodalTypes, Sample

logger = logging.getLogger(__name__)

_TOKENIZE_BATCH = 1024
_TOKENIZE_TIMEOUT_S = 600.0
"""For a batch; prompts may be long."""
T = TypeVar("T")
R = TypeVar("R")
Row = tuple[str, list[dict[str, Any]], dict[str, Any]]
"""What names a row in errors, its messages, and further arguments of the chat template."""

RENDER_TIMEOUT_S = 60.0
POLL_INTERVAL_S = 0.5
TEMPLATE_OVERDUE = (
    "the chat template is still rendering after {:.0f} s; a loop in it may never end. Mend the template of "
    "--hf-checkpoint (chat_template.jinja), or the row."
)
TOKENIZER_OVERDUE = (
    "the tokenizer is still at work after {:.0f} s; a regular expression of it may never end. Mend tokenizer.json of "
    "--hf-checkpoint, or the row."
)


def as_messages(prompt: Any, where: str) -> list[dict[str, Any]]:
    """Return chat messages: a string becomes one user message, messages stay as they are.

    Raises:
        DataError: the prompt is neither.
    """
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    check_prompt(prompt, where)
    return [dict(message) for message in prompt]


def render(tokenizer: Any, messages: list[dict[str, Any]], tools: list[Any] | None, where: str, **kwargs: Any) -> str:
    """Render messages as text by the tokenizer's chat template, up to the point where the response begins.

    Raises:
        DataError: as ``apply_chat_template``.
    """
    return apply_chat_template(tokenizer, messages, where, **{"tools": tools, "add_generation_prompt": True} | kwargs)


class TemplateCheck:
    """The rows of a data set on which its chat template is tried: the first one, and the first one with each role."""

    def __init__(self, kwargs: Mapping[str, Any], rows: list[Row]) -> None:
        self._kwargs = {"add_generation_prompt": True, **kwargs}
        self._rows = rows
        self._seen: set[str] = set()

    def needs(self, prompt: Any) -> bool:
        """Return True for a prompt with a role that no earlier one had."""
        return not _roles(prompt) <= self._seen

    def add(self, messages: list[dict[str, Any]], tools: list[Any] | None, where: str) -> None:
        """Take a row to try the template on."""
        self._seen |= _roles(messages)
        self._rows.append((where, messages, {"tools": tools, **self._kwargs}))


def _roles(prompt: Any) -> set[str]:
    return {"user"} if isinstance(prompt, str) else {message["role"] for message in prompt}


def encode(tokenizer: Any, text: str, where: str = "A prompt") -> list[int]:
    """Return the tokens of a rendered text.

    Raises:
        DataError: the tokenizer breaks on it, or does not come to an end.
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
    """Return ``work(where, row)`` of each row; a template or tokenizer may never end, and nothing can interrupt it.

    Args:
        work: runs in a thread, which is left behind when it is overdue.
        rows: read in that thread, too.
        timeout_s: for one row.
        overdue: what an error says of a row that takes longer.

    Raises:
        DataError: one row took longer, or broke a tokenizer.
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
        except BaseException as error:  # raised again by the caller's thread
            failure.append(error)

    thread = threading.Thread(target=serve, name="slime-chat-template", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(POLL_INTERVAL_S)
        at_work = current
        if at_work is not None and time.monotonic() - at_work[1] > timeout_s and thread.is_alive():
            raise DataError(f"{at_work[0]}: {overdue.format(timeout_s)}")
    if failure and current is not None and type(failure[0]).__name__ == "PanicException":  # of Rust, and no Exception
        raise DataError(
            f"{current[0]}: the tokenizer breaks on it ({failure[0]}). Correct the row, or mend tokenizer.json of "
            "--hf-checkpoint."
        ) from failure[0]
    if failure:
        raise failure[0]
    return done


def insert_multimodal(
    messages: list[dict[str, Any]], row: Mapping[str, Any], multimodal_keys: Mapping[str, str], where: str
) -> list[dict[str, Any]]:
    """Return messages in which each placeholder is replaced by the row's next item of its kind.

    Args:
        messages: chat messages; only contents that are strings are searched.
        row: the data row.
        multimodal_keys: kind (``image``) -> key of the row that lists the items.
        where: the row, for errors.

    Returns:
        New messages.  ``"a <image> b"`` becomes ``[{"type": "text", "text": "a "}, {"type": "image", "image": item},
        {"type": "text", "text": " b"}]``; items that are dicts with a type are taken as they are.
    """
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


# Data sets


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
    flag: str = "--prompt-data",
    input_flag: str = "--input-key",
    label_flag: str = "--label-key",
    readers: Mapping[str, str] = FILES_ALONE,
) -> int:
    """Count the selected rows, once each is known to decode and to hold what the run needs.

    Args:
        path: .jsonl or .parquet, maybe with ``@[a:b]``.
        input_key: key that every row must have.
        label_key: key that every row must have, when given.
        tool_key, metadata_key: keys that rows may have.
        multimodal_keys: kind -> key; rows without such items may lack the key.
        some_keys: key -> its flag; at least one row must have it.
        grader: the built-in one of rows that name none; None when another one judges the label.
        rm_types: graders that rows may name; None when nobody asks for these names.
        template: gets the first row, and the first one with each role.
        flag, input_flag, label_flag: names of the flags, for errors.
        readers: import paths of those of paths that are no files, by prefix.

    Raises:
        DataError: naming the file, the line and what is wrong.
    """
    is_file = not path.startswith(tuple(readers))
    file, rows = checked_file(path, flag) if is_file else (Path(path), split_path(path)[1])
    required = {input_key: input_flag} | ({label_key: label_flag} if label_key else {})
    columns = {*required, *(some_keys or ()), metadata_key, tool_key or ""}
    unseen, first = dict(some_keys or {}), list[str]()
    if is_file and file.suffix == ".parquet":
        first, unseen = parquet_columns(file), {}
        _check_keys(first, {**required, **(some_keys or {})}, f"{file} (its columns)")
        columns |= set((multimodal_keys or {}).values())
    num_rows = 0
    for where, row in read_rows(path, flag, columns=columns, readers=readers):
        _check_keys(row, required, where)
        check_prompt(row[input_key], where)
        metadata = parse_metadata(row.get(metadata_key), where)
        tools = parse_tools(row.get(tool_key), where) if tool_key else None
        if rm_types is not None:
            check_grader(metadata, where, rm_types)
        if label_key:
            check_label(row[label_key], where, f"{label_key} ({label_flag})", metadata.get("rm_type") or grader)
        if multimodal_keys and multimodal_keys.values() & row.keys():
            _check_images(_normalised_prompt(row, input_key, multimodal_keys, True, where), where)
        if template is not None and template.needs(row[input_key]):
            template.add(_normalised_prompt(row, input_key, multimodal_keys, True, where), tools, where)
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


class Dataset:
    """The samples of one prompt file, in file order or in the order of an epoch.

    Invariant: ``samples`` is a permutation of ``origin_samples``, which depends on seed and epoch only;
    ``digests`` tell these rows in this order from others.
    """

    def __init__(
        self,
        path: str,
        tokenizer: Any,
        processor: Any,
        max_length: int | None,
        *,
        prompt_key: str = "text",
        multimodal_keys: Mapping[str, str] | None = None,
        label_key: str | None = None,
        tool_key: str | None = None,
        metadata_key: str = "metadata",
        seed: int = 42,
        apply_chat_template: bool = False,
        apply_chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: list[Any] | None = None,
        readers: Mapping[str, str] = FILES_ALONE,
    ) -> None:
        """Read ``path``.

        Args:
            path: .jsonl or .parquet, maybe with ``@[a:b]``.
            tokenizer: renders the chat template and counts tokens.
            processor: of a multimodal model, else None.
            max_length: prompts with more tokens are left out; None keeps all.
            prompt_key, label_key, tool_key, metadata_key: keys of a row.  Rows may lack tools and metadata.
            multimodal_keys: kind -> key, for example ``{"image": "images"}``.
            seed: of the shuffling.
            apply_chat_template: render messages to text, ready for the response.
            apply_chat_template_kwargs: further arguments of the template.
            tools: of rows that have none of their own.
            readers: import paths of those of paths that are no files, by prefix.
        """
        self.path = path
        self.seed = seed
        self.epoch_id = -1
        self.origin_samples: list[Sample] = []
        template_kwargs = dict(apply_chat_template_kwargs or {})
        digests: dict[int, bytes] = {}

        def read(where: str, row: dict[str, Any]) -> Sample:
            required = {prompt_key: "--input-key"} | ({label_key: "--label-key"} if label_key else {})
            _check_keys(row, required, where)
            metadata = parse_metadata(row.get(metadata_key), where)
            own_tools = parse_tools(row.get(tool_key), where) if tool_key else None
            images = [row.get(key) for key in (multimodal_keys or {}).values()]
            label = row[label_key] if label_key else None
            digest = row_digest(row[prompt_key], label, metadata, own_tools, images)
            if own_tools is not None:
                metadata["tools"] = own_tools
            prompt = _normalised_prompt(row, prompt_key, multimodal_keys, apply_chat_template, where)
            offered = own_tools or tools or None
            rendered = render(tokenizer, prompt, offered, where, **template_kwargs) if apply_chat_template else prompt
            check_label(label, where, f"{label_key} (--label-key)")
            sample = Sample(
                prompt=rendered,
                multimodal_inputs=_multimodal_inputs(prompt, processor, where),
                apply_chat_template_kwargs=dict(template_kwargs),
                label=label,
                metadata=metadata,
            )
            digests[id(sample)] = digest
            return sample

        rows = read_rows(path, readers=readers)
        self.origin_samples = list(
            map_with_deadline(read, rows) if apply_chat_template else itertools.starmap(read, rows)
        )
        if not self.origin_samples:
            raise DataError(f"{path} selects no row; at least one is needed.")
        if max_length is not None:
            self.origin_samples = _drop_long(self.origin_samples, tokenizer, processor, max_length, path)
        self.samples = self.origin_samples
        self.digests = {"": RowDigests([digests[id(sample)] for sample in self.origin_samples])}

    def shuffle(self, new_epoch_id: int) -> None:
        """Put the samples into the order of an epoch; it depends on nothing but the seed and the epoch."""
        if new_epoch_id == self.epoch_id:
            return
        order = list(range(len(self.origin_samples)))
        random.Random(self.seed + new_epoch_id).shuffle(order)
        self.samples = [self.origin_samples[index] for index in order]
        self.epoch_id = new_epoch_id

    def __getitem__(self, index: int) -> Sample:
        return self.samples[index]

    def __len__(self) -> int:
        return len(self.samples)


def _check_keys(row: Mapping[str, Any] | Sequence[str], required: Mapping[str, str], where: str) -> None:
    for key, flag in required.items():
        if key not in row:
            raise DataError(f"{where} has no key {key!r}, which {flag} names; it has {', '.join(row) or 'none'}.")


def _normalised_prompt(
    row: Mapping[str, Any],
    prompt_key: str,
    multimodal_keys: Mapping[str, str] | None,
    apply_chat_template: bool,
    where: str,
) -> Any:
    """Return the prompt: text stays text unless a chat template or multimodal items need messages."""
    prompt = row[prompt_key]
    check_prompt(prompt, where)
    if isinstance(prompt, str) and not apply_chat_template and not multimodal_keys:
        return prompt
    messages = as_messages(prompt, where)
    return insert_multimodal(messages, row, multimodal_keys, where) if multimodal_keys else messages


def _check_images(prompt: list[dict[str, Any]], where: str) -> None:
    """Decode the images of a row that are local; those behind URLs are fetched when the job reads its data.

    Raises:
        DataError: one of them cannot be used; it names the row.
    """
    try:
        for source in image_sources(prompt):
            if not str(source)[:8].lower().startswith(("http://", "https://")):
                open_image(source)
    except DataError as error:
        raise DataError(f"{where}: {error}") from error


def _multimodal_inputs(prompt: Any, processor: Any, where: str) -> dict[str, Any] | None:
    """Return the images of a prompt; None for a text model or a prompt of text only."""
    if processor is None or not isinstance(prompt, list):
        return None
    try:
        found = process_vision_info(prompt, processor)
    except DataError as error:
        raise DataError(f"{where}: {error}") from error
    except Exception as error:  # image readers raise anything
        raise DataError(
            f"{where}: an image of the prompt cannot be read ({said_by(error)[:300]}). Correct the row."
        ) from error
    return found if any(found.values()) else None


def _drop_long(samples: list[Sample], tokenizer: Any, processor: Any, max_length: int, path: str) -> list[Sample]:
    """Drop samples with more than ``max_length`` prompt tokens; prompts that are messages are not measured."""
    lengths: dict[int, int] = {}
    texts = [index for index, sample in enumerate(samples) if isinstance(sample.prompt, str)]
    if len(texts) < len(samples):
        logger.warning(
            "%s: %d prompts are messages; only rendered prompts are measured against the maximal length %d "
            "(--apply-chat-template renders them).",
            path,
            len(samples) - len(texts),
            max_length,
        )
    plain = [index for index in texts if samples[index].multimodal_inputs is None]

    def count(_: str, batch: list[int]) -> dict[int, int]:
        ids = tokenizer([samples[index].prompt for index in batch], add_special_tokens=False)["input_ids"]
        return {index: len(row) for index, row in zip(batch, ids, strict=True)}

    begins = range(0, len(plain), _TOKENIZE_BATCH)
    batches = ((f"{path}: prompts from {begin}", plain[begin : begin + _TOKENIZE_BATCH]) for begin in begins)
    for found in map_with_deadline(count, batches, timeout_s=_TOKENIZE_TIMEOUT_S, overdue=TOKENIZER_OVERDUE):
        lengths |= found
    for index in set(texts) - set(plain):
        sample = samples[index]
        output = processor(text=sample.prompt, **build_processor_kwargs(sample.multimodal_inputs))
        lengths[index] = len(output["input_ids"][0])
    kept = [sample for index, sample in enumerate(samples) if lengths.get(index, 0) <= max_length]
    if not kept:
        raise DataError(
            f"{path}: all {len(samples)} prompts have more than {max_length} tokens (shortest: "
            f"{min(lengths.values())}); raise --rollout-max-prompt-len or --eval-max-prompt-len."
        )
    if len(kept) < len(samples):
        logger.info(
            "%s: %d of %d prompts left out, longer than %d tokens",
            path,
            len(samples) - len(kept),
            len(samples),
            max_length,
        )
    return kept


# What a data set holds, as digests: whether it is another one at a resume, in which field, and from which row on.
# A row counts by what reaches a prompt, a grader or a tool: its ``FIELDS``.


FIELDS = ("prompt", "label", "metadata", "tools", "images")
"""``images``: their names, or their bytes where a row holds them, of every key of ``--multimodal-keys``."""


def digest_of(value: Any) -> int:
    """Return a hash of a value of a row, 64 bits."""
    return xxhash.xxh3_64_intdigest(json.dumps(value, default=_plain, separators=(",", ":")).encode())


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return xxhash.xxh3_64_hexdigest(value)
    return value.tolist() if hasattr(value, "tolist") else str(value)


def row_digest(prompt: Any, label: Any, metadata: Any, tools: Any, images: Any) -> bytes:
    """Return the digests of a row's ``FIELDS``, and the one of prompt and label that earlier versions had."""
    text = json.dumps([prompt, label], default=str, separators=(",", ":"))
    fields = map(digest_of, (prompt, label, metadata, tools, images))
    return struct.pack("<6Q", *fields, xxhash.xxh3_64_intdigest(text.encode()))


class RowDigests:
    """The digests of the rows of one data set, in their order."""

    def __init__(self, rows: Sequence[bytes]) -> None:
        table = np.frombuffer(b"".join(rows), "<u8").reshape(len(rows), len(FIELDS) + 1)
        self.before = digest_of([table[:, -1].tolist(), None])
        """The digest that positions of earlier versions hold: of prompts and labels alone."""
        fields = {name: xxhash.xxh3_64_hexdigest(table[:, k].tobytes()) for k, name in enumerate(FIELDS)}
        odd = np.arange(1, 2 * len(FIELDS), 2, dtype="<u8")
        each = ((table[:, :-1] * odd).sum(axis=1, dtype="<u8") >> np.uint64(32)).astype("<u4")
        self.state: dict[str, Any] = {"fields": fields, "rows": each.tobytes().hex()}
        """For the data position: the digest of each field, and 32 bits for each row."""


def changed_rows(saved: Any, present: Mapping[str, RowDigests]) -> list[str]:
    """Return in words what other rows the data sets have, by name, than those of a data position.

    Args:
        saved: the states of their :class:`RowDigests`, as a file gave them.
        present: those of the data sets, whose order is their own.
    """
    states = saved if isinstance(saved, Mapping) else {}
    found = []
    for name, digests in present.items():
        before, now = states.get(name), digests.state
        if before == now:
            continue
        fields, rows = (before.get("fields"), before.get("rows")) if isinstance(before, Mapping) else (None, None)
        fields, rows = (fields if isinstance(fields, Mapping) else {}), (rows if isinstance(rows, str) else "")
        what = " and ".join(field for field in FIELDS if fields.get(field) != now["fields"][field]) + " changed"
        if len(rows) != len(now["rows"]):
            what = f"{len(now['rows']) // 8}, before {len(rows) // 8}"
        where = f"data set {name} of --prompt-data" if name else "--prompt-data"
        found.append(f"{where} has other rows: {what}, first in row {_first_difference(rows, now['rows'])}")
    if not found and list(states) != list(present):
        found.append(f"--prompt-data lists the data sets {', '.join(present)}, before {', '.join(map(str, states))}")
    return found


def _first_difference(before: str, now: str) -> int:
    """Return the number, from 1, of the first row whose 8 digits are others."""
    size = min(len(before), len(now))
    differing = (start for start in range(0, size, 8) if before[start : start + 8] != now[start : start + 8])
    return next(differing, size) // 8 + 1
