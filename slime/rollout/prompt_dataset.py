"""Reads prompt data: one ``Sample`` per row of a file, with its prompt as the model reads it.

Nothing is skipped silently: a row with missing keys or unusable values ends the run with an error that names the file
and line.
"""

from __future__ import annotations

import itertools
import json
import logging
import random
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xxhash

from slime.rollout.prompt_files import FILES_ALONE, check_label, parse_metadata, parse_tools, read_rows
from slime.rollout.prompts import TOKENIZER_OVERDUE, check_keys, map_with_deadline, normalised_prompt, render
from slime.utils.errors import DataError
from slime.utils.plugins import said_by
from slime.utils.processing_utils import build_processor_kwargs, process_vision_info
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

_TOKENIZE_BATCH = 1024
_TOKENIZE_TIMEOUT_S = 600.0
"""Per batch; prompts may be long."""


class Dataset:
    """The samples of one prompt file, in file order or in the shuffled order of an epoch.

    Invariant: ``samples`` is a permutation of ``origin_samples`` that depends only on the seed and the epoch.
    ``digests`` identify these rows in file order.
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
            path: .jsonl or .parquet file, optionally followed by a row range ``@[a:b]``.
            tokenizer: Renders the chat template and counts tokens.
            processor: Processor of a multimodal model; None for a text model.
            max_length: Prompts with more tokens are left out; None keeps all.
            prompt_key, label_key, tool_key, metadata_key: Keys of a row.  Tools and metadata are optional in a row.
            multimodal_keys: Kind -> key, for example ``{"image": "images"}``.
            seed: Seed of the shuffling.
            apply_chat_template: Render messages to text that ends where the response begins.
            apply_chat_template_kwargs: Extra arguments for the template.
            tools: Tools for rows that have none of their own.
            readers: Path prefix -> import path of a :data:`~slime.rollout.prompt_files.Reader`, for data sets that are
                not files.

        Raises:
            DataError: the file cannot be read, no row is left, or a row is malformed.
        """
        self.path = path
        self.seed = seed
        self.epoch_id = -1
        self.origin_samples: list[Sample] = []
        template_kwargs = dict(apply_chat_template_kwargs or {})
        digests: dict[int, bytes] = {}

        def read(where: str, row: dict[str, Any]) -> Sample:
            required = {prompt_key: "--input-key"} | ({label_key: "--label-key"} if label_key else {})
            check_keys(row, required, where)
            metadata = parse_metadata(row.get(metadata_key), where)
            own_tools = parse_tools(row.get(tool_key), where) if tool_key else None
            images = [row.get(key) for key in (multimodal_keys or {}).values()]
            label = row[label_key] if label_key else None
            digest = row_digest(row[prompt_key], label, metadata, own_tools, images)
            if own_tools is not None:
                metadata["tools"] = own_tools
            prompt = normalised_prompt(row, prompt_key, multimodal_keys, apply_chat_template, where)
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
        """Shuffle the samples into the order of an epoch, which depends only on the seed and the epoch."""
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


def _multimodal_inputs(prompt: Any, processor: Any, where: str) -> dict[str, Any] | None:
    """Return the images of a prompt; None for a text model or a text-only prompt."""
    if processor is None or not isinstance(prompt, list):
        return None
    try:
        found = process_vision_info(prompt, processor)
    except DataError as error:
        raise DataError(f"{where}: {error}") from error
    except Exception as error:  # image readers may raise anything
        raise DataError(
            f"{where}: an image of the prompt cannot be read ({said_by(error)[:300]}). Correct the row."
        ) from error
    return found if any(found.values()) else None


def _drop_long(samples: list[Sample], tokenizer: Any, processor: Any, max_length: int, path: str) -> list[Sample]:
    """Drop samples with more than ``max_length`` prompt tokens; prompts that are messages are not checked."""
    lengths: dict[int, int] = {}
    texts = [index for index, sample in enumerate(samples) if isinstance(sample.prompt, str)]
    if len(texts) < len(samples):
        logger.warning(
            "%s: %d prompts are messages; only rendered prompts are checked against the maximum length %d "
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


# Digests of a data set.  At resume they tell whether the data changed, in which field, and from which row on.
# They cover what reaches a prompt, a grader or a tool: the ``FIELDS`` of each row.


FIELDS = ("prompt", "label", "metadata", "tools", "images")
"""``images`` are the values of every key of ``--multimodal-keys``: file names, or bytes if a row holds them."""


def digest_of(value: Any) -> int:
    """Return a 64-bit hash of a value."""
    return xxhash.xxh3_64_intdigest(json.dumps(value, default=_plain, separators=(",", ":")).encode())


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return xxhash.xxh3_64_hexdigest(value)
    return value.tolist() if hasattr(value, "tolist") else str(value)


def row_digest(prompt: Any, label: Any, metadata: Any, tools: Any, images: Any) -> bytes:
    """Return the packed 64-bit digests of a row's ``FIELDS``, then the prompt-and-label digest of earlier versions."""
    text = json.dumps([prompt, label], default=str, separators=(",", ":"))
    fields = map(digest_of, (prompt, label, metadata, tools, images))
    return struct.pack("<6Q", *fields, xxhash.xxh3_64_intdigest(text.encode()))


class RowDigests:
    """Digests of the rows of one data set, in row order."""

    def __init__(self, rows: Sequence[bytes]) -> None:
        table = np.frombuffer(b"".join(rows), "<u8").reshape(len(rows), len(FIELDS) + 1)
        self.before = digest_of([table[:, -1].tolist(), None])
        """Digest in data positions of earlier versions, which covers prompts and labels only."""
        fields = {name: xxhash.xxh3_64_hexdigest(table[:, k].tobytes()) for k, name in enumerate(FIELDS)}
        odd = np.arange(1, 2 * len(FIELDS), 2, dtype="<u8")
        each = ((table[:, :-1] * odd).sum(axis=1, dtype="<u8") >> np.uint64(32)).astype("<u4")
        self.state: dict[str, Any] = {"fields": fields, "rows": each.tobytes().hex()}
        """Stored in the data position: a digest per field, and 32 bits per row as hex."""


def changed_rows(saved: Any, present: Mapping[str, RowDigests]) -> list[str]:
    """Describe how the rows of the data sets differ from those of a saved data position; empty if they are the same.

    Args:
        saved: Data set name -> ``RowDigests.state``, as read from a file.
        present: Data set name -> current digests, in data set order.
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
    """Return the number (from 1) of the first row whose 8 hex digits differ."""
    size = min(len(before), len(now))
    differing = (start for start in range(0, size, 8) if before[start : start + 8] != now[start : start + 8])
    return next(differing, size) // 8 + 1
