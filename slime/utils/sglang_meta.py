"""Reads and checks an engine's metadata on a response: log-probs, kept nuclei, routed experts, counters.

An engine answers ``/generate`` with ``{"text": ..., "meta_info": {...}}``.  Integer arrays in ``meta_info`` are base64
of little-endian int32, raw bytes, lists or tensors (``slime.utils.misc.decode_int32``).

A broken engine, or one with another protocol version, may answer with status 200 and wrong numbers that would silently
be trained on.  ``problem_with_answer`` finds these before the answer becomes part of a sample.
"""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import orjson
import torch
from torch import Tensor

from slime.utils.errors import DataError
from slime.utils.misc import decode_int32_meta_array, decode_json

TOP_P_ASK = "return_top_p_token_ids"
"""Key of a request's ``custom_params`` that requests the nuclei."""
TOP_P_IDS_KEYS = ("top_p_token_ids", "top_p_kept_token_ids")
TOP_P_OFFSETS_KEYS = ("top_p_token_offsets", "top_p_kept_token_offsets")
ROUTED_EXPERTS_KEY = "routed_experts"
ROUTED_EXPERTS_START_KEY = "routed_experts_start_len"


@dataclass
class _MetaSums:
    """Counters summed over the engine calls of one sample."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.copy(self)

    def to_dict(self) -> dict[str, int]:
        return dict(self.__dict__)

    @classmethod
    def from_dict(cls, data: Mapping[str, int]) -> Any:
        return cls(**{spec.name: data.get(spec.name, 0) for spec in fields(cls)})


@dataclass
class SampleSpecInfo(_MetaSums):
    """Speculative decoding of one sample, summed over its engine calls."""

    spec_accept_token_num: int = 0
    spec_draft_token_num: int = 0
    spec_verify_ct: int = 0
    completion_token_num: int = 0

    @property
    def spec_accept_rate(self) -> float:
        """Accepted draft tokens / proposed draft tokens; 0 without proposals."""
        return self.spec_accept_token_num / self.spec_draft_token_num if self.spec_draft_token_num else 0.0

    @property
    def spec_accept_length(self) -> float:
        """Generated tokens per verification step; 0 without verification steps."""
        return self.completion_token_num / self.spec_verify_ct if self.spec_verify_ct else 0.0

    def add(self, meta_info: Mapping[str, Any]) -> None:
        # SGLang 0.5.15 has new names; older engines and recorded answers have the old ones.
        accepted = meta_info.get("spec_num_correct_drafts", meta_info.get("spec_accept_token_num"))
        drafted = meta_info.get("spec_num_proposed_drafts", meta_info.get("spec_draft_token_num"))
        self.spec_accept_token_num += accepted or 0
        self.spec_draft_token_num += drafted or 0
        self.spec_verify_ct += meta_info.get("spec_verify_ct") or 0
        self.completion_token_num += meta_info.get("completion_tokens") or 0


@dataclass
class SamplePrefixCacheInfo(_MetaSums):
    """Prefix-cache hits of one sample's prompt tokens, summed over its engine calls."""

    cached_tokens: int = 0
    total_prompt_tokens: int = 0

    @property
    def prefix_cache_hit_rate(self) -> float:
        """Cached prompt tokens / prompt tokens; 0 without prompt tokens."""
        return self.cached_tokens / self.total_prompt_tokens if self.total_prompt_tokens else 0.0

    def add(self, meta_info: Mapping[str, Any]) -> None:
        self.cached_tokens += meta_info.get("cached_tokens") or 0
        self.total_prompt_tokens += meta_info.get("prompt_tokens") or 0


class TokenLogProbs(Sequence[Any]):
    """An engine's list of ``[log_prob, token_id, None]``, stored as two columns.

    A long response has tens of thousands of entries; as lists they would take five times the memory and be traversed
    repeatedly by the garbage collector.
    """

    def __init__(self, ids: list[int], log_probs: list[float]) -> None:
        self.ids = ids
        self.log_probs = log_probs

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return TokenLogProbs(self.ids[index], self.log_probs[index])
        return [self.log_probs[index], self.ids[index], None]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)


def read_output_tokens(meta: Mapping[str, Any]) -> tuple[list[int], list[float]]:
    """Return ``(token ids, log-probs)`` of the generated tokens; both empty if nothing was generated.

    ``output_token_logprobs`` is a list of ``[log_prob, token_id, ...]``, or a ``TokenLogProbs``.
    """
    entries = meta.get("output_token_logprobs") or []
    if isinstance(entries, TokenLogProbs):
        return entries.ids, entries.log_probs
    return [int(entry[1]) for entry in entries], [float(entry[0]) for entry in entries]


_LOG_PROBS_START = b'"output_token_logprobs":[['
_LOG_PROBS_END = b"null]]"
_IDS_START = b'"output_ids":['


def decode_generate_answer(body: bytes) -> Any:
    """Decode the JSON answer of ``/generate``, with ``output_token_logprobs`` as ``TokenLogProbs``.

    The entries are cut out of the text and parsed as one flat array, several times as fast as nested lists.  The marks
    are unambiguous in the text: inside a JSON string their quotes would be escaped.  ``output_ids``, which repeats the
    ids, is left empty.  Answers in another layout (spaces between values, texts next to the ids) are decoded normally.
    """
    start = body.find(_LOG_PROBS_START)
    stop = body.find(_LOG_PROBS_END, start)
    if start < 0 or stop < 0:
        return decode_json(body)
    start, stop = start + len(_LOG_PROBS_START), stop + len(_LOG_PROBS_END)
    columns = _parse_entries(body[start:stop])
    if columns is None:
        return decode_json(body)
    answer = decode_json(_without_ids(body[: start - 2]) + b"0" + body[stop:])
    if not isinstance(answer, dict) or not isinstance(answer.get("meta_info"), dict):
        return decode_json(body)
    answer["meta_info"]["output_token_logprobs"] = columns
    return answer


def _without_ids(head: bytes) -> bytes:
    start = head.find(_IDS_START)
    stop = head.find(b"]", start)
    return head if start < 0 or stop < 0 else head[: start + len(_IDS_START)] + head[stop:]


def _parse_entries(entries: bytes) -> TokenLogProbs | None:
    """Return the columns of ``log_prob,id,null],[log_prob,id,null ... null]]``; None for any other text."""
    if b"t" in entries or b"f" in entries or b'"' in entries:  # true, false or a string; cheap to find in the bytes
        return None
    try:
        values = orjson.loads(b"[%b]" % entries.translate(None, b"[]"))
        sent = values[1::3]
        ids = share_ids(sent)
    except (orjson.JSONDecodeError, TypeError):
        return None
    if len(values) != 3 * len(ids) or values[2::3].count(None) != len(ids):
        return None
    if ids is sent and not all(type(token) is int and token >= 0 for token in ids):
        return None
    return TokenLogProbs(ids, values[0::3])


SHARED_IDS = 1 << 18
"""Token ids below this (larger than current vocabularies) are shared int objects."""


@functools.cache
def _shared_ids() -> list[int]:
    return list(range(SHARED_IDS))


def share_ids(ids: list[int]) -> list[int]:
    """Return equal ids as int objects shared by all samples: 8 bytes per token instead of 40.

    Raises:
        TypeError: an id is not an integer.
    """
    if len(ids) < 2:
        return ids
    try:
        shared = list(operator.itemgetter(*ids)(_shared_ids()))
    except IndexError:  # an id of SHARED_IDS or more
        return ids
    return shared if sum(shared) == sum(ids) else ids  # negative ids would index from the end of the table


def read_top_p_spans(meta: Mapping[str, Any], num_tokens: int) -> tuple[Tensor, Tensor] | None:
    """Return the token ids from which each generated token was sampled, as ``(ids, offsets)``; None if not sent.

    Args:
        num_tokens: number of generated tokens that the spans must cover.

    Returns:
        ``ids`` int32 [offsets[-1]] and ``offsets`` int32 [num_tokens + 1]: token ``t`` was sampled from
        ``ids[offsets[t]:offsets[t + 1]]``.
    """
    ids = decode_int32_meta_array(meta, TOP_P_IDS_KEYS)
    offsets = decode_int32_meta_array(meta, TOP_P_OFFSETS_KEYS)
    if ids is None and offsets is None:
        return None
    if ids is None or offsets is None:
        present, absent = ("ids", "offsets") if offsets is None else ("offsets", "ids")
        raise DataError(f"meta_info has top-p {present} without {absent}; the engine must send both or neither.")
    if len(offsets) != num_tokens + 1:
        raise DataError(
            f"top-p offsets have {len(offsets)} entries for {num_tokens} new tokens; {num_tokens + 1} are needed."
        )
    if offsets[0] != 0 or offsets[-1] != len(ids) or (offsets.diff() < 0).any():
        raise DataError(
            f"top-p offsets run from {int(offsets[0])} to {int(offsets[-1])}; they must rise from 0 to the {len(ids)} "
            "ids sent."
        )
    return ids, offsets


def extend_top_p_spans(
    spans: tuple[Any, Any] | None, new_spans: tuple[Tensor, Tensor] | None, *, num_earlier: int, num_new: int
) -> tuple[Any, Any] | None:
    """Append the spans of ``num_new`` more tokens to those of a response.

    Without ``new_spans``, the new tokens get empty spans if the response already has spans; otherwise nothing changes.
    Without ``spans``, the ``num_earlier`` tokens before the new ones get empty spans.
    """
    if new_spans is None:
        if spans is None or num_new == 0:
            return spans
        new_spans = torch.zeros(0, dtype=torch.int32), torch.zeros(num_new + 1, dtype=torch.int32)
    if spans is None:
        spans = torch.zeros(0, dtype=torch.int32), torch.zeros(num_earlier + 1, dtype=torch.int32)
    ids = torch.as_tensor(spans[0], dtype=torch.int32)
    offsets = torch.as_tensor(spans[1], dtype=torch.int32)
    return torch.cat([ids, new_spans[0]]), torch.cat([offsets, new_spans[1][1:] + offsets[-1]])


def read_routed_experts(
    meta: Mapping[str, Any], *, num_tokens: int, num_layers: int, top_k: int, earlier: Tensor | None = None
) -> Tensor | None:
    """Return the experts of each position, int32 [num_tokens - 1, num_layers, top_k]; None if not sent.

    There is one row less than tokens because the last token was never an input.  An engine that found
    ``routed_experts_start_len`` positions in its cache sends only the rows after them; ``earlier`` supplies the rest.
    """
    flat = decode_int32_meta_array(meta, ROUTED_EXPERTS_KEY)
    if flat is None:
        return None
    start = int(meta.get(ROUTED_EXPERTS_START_KEY) or 0)
    num_rows = max(0, num_tokens - 1 - start)
    if len(flat) != num_rows * num_layers * top_k:
        raise DataError(
            f"meta_info['routed_experts'] has {len(flat)} values; {num_tokens} tokens from position {start} need "
            f"{num_rows} x {num_layers} layers x {top_k} experts = {num_rows * num_layers * top_k}."
        )
    rows = flat.reshape(num_rows, num_layers, top_k)
    if start == 0:
        return rows
    if earlier is None or earlier.shape[0] < start:
        known = 0 if earlier is None else earlier.shape[0]
        raise DataError(
            f"meta_info['routed_experts_start_len'] is {start}, but the sample knows the routing of {known} positions."
        )
    return torch.cat([earlier[:start].to(torch.int32), rows])


# Whether an answer can be used


MAX_LOG_PROB = 1e-3
"""Upper limit of log-probs: 0, plus a tolerance for an engine's rounding."""
MIN_LOG_PROB = -1e30
"""Lower limit of log-probs, to exclude minus infinity."""
MAX_TOKEN = 2**31 - 1
MAX_TEXT_PER_TOKEN = 4096
"""Maximum characters per token; the longest tokens of current vocabularies have a few hundred."""
MAX_VERSION_LENGTH = 200
_LOOK_AT_LOG = "Look at the log of the engine."


def problem_with_answer(output: Any, payload: Mapping[str, Any]) -> str | None:
    """Return why an answer is unusable, with the field and its value; None if it is usable.

    Args:
        payload: body of the request; empty if unknown.
    """
    if not isinstance(output, dict) or not isinstance(output.get("meta_info"), dict):
        return (
            f"it is {str(output)[:300]!r}; /generate must return an object with 'text' and 'meta_info'. Look at the "
            "log of the engine or the router."
        )
    meta = output["meta_info"]
    if not isinstance(meta.get("finish_reason"), dict):
        return f"it has no finish_reason: {str(meta)[:300]}. {_LOOK_AT_LOG}"
    if not isinstance(meta["finish_reason"].get("type"), str | None):
        return f"its finish_reason is {_shown(meta['finish_reason'])}, whose type must be a string. {_LOOK_AT_LOG}"
    entries = meta.get("output_token_logprobs")
    if entries is None:
        entries = []
    problem = (
        _problem_with_tokens(entries)
        or _problem_with_facts(meta)
        or _problem_with_counts(output, meta, payload, len(entries))
    )
    return f"{problem} {_LOOK_AT_LOG}" if problem else None


def _problem_with_tokens(entries: Any) -> str | None:
    if isinstance(entries, TokenLogProbs):
        try:
            low, high = min(entries.log_probs, default=0), max(entries.log_probs, default=0)
            if MIN_LOG_PROB <= low and high <= MAX_LOG_PROB and max(entries.ids, default=0) <= MAX_TOKEN:
                return None  # the ids were checked when the text was parsed
        except TypeError:
            pass  # a log-prob is missing; the loop below finds it
    elif not isinstance(entries, list):
        return f"meta_info['output_token_logprobs'] is {_shown(entries)}; it must be a list."
    for position, entry in enumerate(entries):
        where = f"meta_info['output_token_logprobs'][{position}]"
        if not isinstance(entry, Sequence) or isinstance(entry, str) or len(entry) < 2:
            return f"{where} is {_shown(entry)}; it must be [log_prob, token_id, ...]."
        log_prob, token = entry[0], entry[1]
        if type(log_prob) not in (float, int) or not MIN_LOG_PROB <= log_prob <= MAX_LOG_PROB:
            return f"{where} has the log-prob {_shown(log_prob)}; it must be a finite number, at most 0."
        if type(token) is not int or not 0 <= token <= MAX_TOKEN:
            return f"{where} has the token {_shown(token)}; it must be a whole number from 0 on."
    return None


_COUNTS = (
    *("cached_tokens", "spec_verify_ct", "spec_num_correct_drafts", "spec_num_proposed_drafts"),
    *("spec_accept_token_num", "spec_draft_token_num"),
)


def _problem_with_facts(meta: Mapping[str, Any]) -> str | None:
    for name in _COUNTS:
        value = meta.get(name) or 0
        if type(value) is not int or value < 0:
            return f"meta_info[{name!r}] is {_shown(value)}; it must be a whole number from 0 on."
    version = meta.get("weight_version")
    if version is not None and (type(version) not in (str, int) or len(str(version)) > MAX_VERSION_LENGTH):
        return f"meta_info['weight_version'] is {_shown(version)}; it must be a short string or a number."
    return None


def _problem_with_counts(
    output: Mapping[str, Any], meta: Mapping[str, Any], payload: Mapping[str, Any], num_tokens: int
) -> str | None:
    limit = (payload.get("sampling_params") or {}).get("max_new_tokens")
    if isinstance(limit, int) and num_tokens > limit:
        return f"it has {num_tokens} tokens; max_new_tokens of the request is {limit}."
    # An aborted request, or one with speculative decoding, may be counted before its last tokens are listed.
    is_counted = meta["finish_reason"].get("type") != "abort" and "spec_verify_ct" not in meta
    completion = meta.get("completion_tokens")
    if is_counted and completion is not None and completion != num_tokens:
        return (
            f"meta_info['completion_tokens'] is {_shown(completion)}, but output_token_logprobs has {num_tokens} "
            "entries; there must be one for each token."
        )
    # One placeholder id represents all tokens of an image.
    input_ids = None if payload.get("image_data") else payload.get("input_ids")
    prompt = meta.get("prompt_tokens")
    if is_counted and input_ids is not None and prompt is not None and prompt != len(input_ids):
        return f"meta_info['prompt_tokens'] is {_shown(prompt)}; the request has {len(input_ids)} input_ids."
    ids = output.get("output_ids")
    if (
        is_counted
        and not payload.get("stream")
        and ids is not None
        and (not isinstance(ids, list) or len(ids) not in (0, num_tokens))
    ):
        count = len(ids) if isinstance(ids, list) else _shown(ids)
        return f"output_ids has {count} entries, but output_token_logprobs has {num_tokens}; both list the new tokens."
    text = output.get("text")
    if text is not None and not isinstance(text, str):
        return f"its text is {_shown(text)}; it must be a string."
    if text and len(text) > MAX_TEXT_PER_TOKEN * num_tokens:
        return f"its text has {len(text)} characters for {num_tokens} tokens ({_shown(text)})."
    return None


def _shown(value: Any) -> str:
    return repr(value[:80] if isinstance(value, str | list) else value)[:200]
