"""Prompt files: .jsonl or .parquet in, one ``Sample`` per row out.

``path@[a:b]`` selects rows as a Python slice.  Nothing is skipped in silence: a line that does not decode and a row
without its keys end the run, with the file and the line.  ``check_prompt_file`` finds them before any GPU is taken.
"""

from __future__ import annotations

import itertools
import json
import logging
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from slime.rollout.prompt_template import (
    as_messages,
    check_prompt,
    insert_multimodal,
    parse_metadata,
    parse_tools,
    render,
)
from slime.utils.errors import DataError
from slime.utils.processing_utils import build_processor_kwargs, process_vision_info
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

SUFFIXES = (".jsonl", ".parquet")
_SLICED = re.compile(r"^(?P<path>.+)@\[(?P<start>-?\d*):(?P<stop>-?\d*)\]$")
_TOKENIZE_BATCH = 1024


def split_path(path: str) -> tuple[str, slice]:
    """Return ``("data.jsonl", slice(0, 100))`` from ``"data.jsonl@[0:100]"``; every row without the suffix."""
    match = _SLICED.match(path)
    if match is None:
        return path, slice(None)
    start, stop = (int(match[name]) if match[name] else None for name in ("start", "stop"))
    return match["path"], slice(start, stop)


def read_rows(path: str, flag: str = "--prompt-data") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield ``(where, row)`` for each selected row; ``where`` is ``"<file> line <n>"``, counted from 1, for errors.

    Raises:
        DataError: the file is missing or of another kind, or a selected line is not a JSON object.
    """
    file, rows = _checked_file(path, flag)
    if file.suffix == ".parquet":
        numbered = _read_parquet(file)
        for number, row in _select(numbered, rows):
            yield f"{file} row {number}", row
        return
    with file.open("rb") as lines:
        filled = ((number, line) for number, line in enumerate(lines, start=1) if line.strip())
        for number, line in _select(filled, rows):
            where = f"{file} line {number}"
            yield where, _decode_line(line, where)


def read_file(path: str) -> Iterator[dict[str, Any]]:
    """Yield the selected rows of a prompt file, as dicts."""
    for _, row in read_rows(path):
        yield row


def check_prompt_file(
    path: str,
    input_key: str,
    *,
    label_key: str | None = None,
    multimodal_keys: Mapping[str, str] | None = None,
    some_keys: Mapping[str, str] | None = None,
    flag: str = "--prompt-data",
    input_flag: str = "--input-key",
    label_flag: str = "--label-key",
) -> int:
    """Count the selected rows, once each is known to decode and to have its keys.  Needs no tokenizer.

    Of a parquet file only the header is read.

    Args:
        path: .jsonl or .parquet, maybe with ``@[a:b]``.
        input_key: key that every row must have.
        label_key: key that every row must have, when given.
        multimodal_keys: kind -> key; rows without such items may lack the key.
        some_keys: key -> its flag; at least one row must have it.
        flag, input_flag, label_flag: names of the flags, for errors.

    Raises:
        DataError: naming the file, the line and what is wrong.
    """
    file, rows = _checked_file(path, flag)
    required = {input_key: input_flag} | ({label_key: label_flag} if label_key else {})
    if file.suffix == ".parquet":
        num_file_rows, columns = _parquet_header(file)
        _check_keys(columns, {**required, **(some_keys or {})}, f"{file} (its columns)")
        num_rows = len(range(*rows.indices(num_file_rows)))
    else:
        num_rows = 0
        unseen, first = dict(some_keys or {}), list[str]()
        for where, row in read_rows(path, flag):
            _check_keys(row, required, where)
            check_prompt(row[input_key], where)
            unseen = {key: name for key, name in unseen.items() if key not in row}
            first = first or list(row)
            num_rows += 1
    if num_rows == 0:
        raise DataError(f"{path} selects no row; {flag} needs at least one.")
    if file.suffix != ".parquet" and unseen:
        key, name = next(iter(unseen.items()))
        raise DataError(f"No row of {path} has the key {key!r}, which {name} names; row 1 has {', '.join(first)}.")
    return num_rows


def get_source(sample: Sample) -> str:
    """Return the origin of a sample's data: ``sample.source``, else ``metadata["source_name"]``, else "unknown"."""
    return getattr(sample, "source", None) or (sample.metadata or {}).get("source_name") or "unknown"


class Dataset:
    """The samples of one prompt file, in file order or in the order of an epoch.

    Invariant: ``samples`` is a permutation of ``origin_samples``, which depends on seed and epoch only.
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
        """
        self.path = path
        self.seed = seed
        self.epoch_id = -1
        self.origin_samples: list[Sample] = []
        template_kwargs = dict(apply_chat_template_kwargs or {})
        for where, row in read_rows(path):
            required = {prompt_key: "--input-key"} | ({label_key: "--label-key"} if label_key else {})
            _check_keys(row, required, where)
            metadata = parse_metadata(row.get(metadata_key), where)
            tools = parse_tools(row.get(tool_key), where) if tool_key else None
            if tools is not None:
                metadata["tools"] = tools
            prompt = _normalised_prompt(row, prompt_key, multimodal_keys, apply_chat_template, where)
            rendered = render(tokenizer, prompt, tools, where, **template_kwargs) if apply_chat_template else prompt
            self.origin_samples.append(
                Sample(
                    prompt=rendered,
                    multimodal_inputs=_multimodal_inputs(prompt, processor),
                    apply_chat_template_kwargs=dict(template_kwargs),
                    label=row[label_key] if label_key else None,
                    metadata=metadata,
                )
            )
        if not self.origin_samples:
            raise DataError(f"{path} selects no row; at least one is needed.")
        if max_length is not None:
            self.origin_samples = _drop_long(self.origin_samples, tokenizer, processor, max_length, path)
        self.samples = self.origin_samples

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


def _checked_file(path: str, flag: str) -> tuple[Path, slice]:
    name, rows = split_path(path)
    file = Path(name)
    if file.suffix not in SUFFIXES:
        raise DataError(
            f"{flag} is {path!r}; the file must end in {' or '.join(SUFFIXES)}, optionally followed by a range of "
            "rows such as @[0:100]."
        )
    if not file.is_file():
        raise DataError(f"{flag} is {path!r}, but there is no file {file.absolute()}.")
    return file, rows


def _decode_line(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        text = line[:60].decode(errors="replace").strip()
        raise DataError(
            f"{where} is not JSON ({error}): {text!r}. Each line of a .jsonl file is one object; a file with one list "
            "of objects must be rewritten with one object per line."
        ) from error
    if not isinstance(row, dict):
        raise DataError(f"{where} is a JSON {type(row).__name__}; each line must be an object such as {{...}}.")
    return row


def _select(numbered: Iterator[Any], rows: slice) -> Iterator[Any]:
    """Return the items of a slice; read as a stream unless a bound counts from the end."""
    if (rows.start or 0) < 0 or (rows.stop or 0) < 0:
        return iter(list(numbered)[rows])
    return itertools.islice(numbered, rows.start, rows.stop)


def _open_parquet(file: Path) -> Any:
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(file)
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{file} cannot be read as parquet: {error}.") from error


def _read_parquet(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    batches = _open_parquet(file).iter_batches()
    return enumerate((row for batch in batches for row in batch.to_pylist()), start=1)


def _parquet_header(file: Path) -> tuple[int, list[str]]:
    opened = _open_parquet(file)
    return opened.metadata.num_rows, list(opened.schema_arrow.names)


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


def _multimodal_inputs(prompt: Any, processor: Any) -> dict[str, Any] | None:
    """Return images and videos of a prompt; None for a text model or a prompt of text only."""
    if processor is None or not isinstance(prompt, list):
        return None
    found = process_vision_info(prompt, processor)
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
    for begin in range(0, len(plain), _TOKENIZE_BATCH):
        batch = plain[begin : begin + _TOKENIZE_BATCH]
        ids = tokenizer([samples[index].prompt for index in batch], add_special_tokens=False)["input_ids"]
        lengths |= {index: len(row) for index, row in zip(batch, ids, strict=True)}
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
