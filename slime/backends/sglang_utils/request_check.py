"""Checks of requests that run before an engine's scheduler gets them.

SGLang 0.5.15 checks little of a request before it reaches the scheduler, whose process crashes on invalid input: a
token outside of the vocabulary, a number of another type, an adapter that was not loaded.  The engine ends with it.
Whatever its endpoint, a request passes :func:`check_request` as the client wrote it, and each of its sequences passes
:func:`check_sequence` as the scheduler would get it.  The server answers 400 with the text of the ValueError.
"""

from __future__ import annotations

import copy
import json
import math
import os
import re
import uuid
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote, urlparse

import numpy

MAX_SEQUENCES = 4096
"""Sequences of one request: its prompts times ``n``."""
MAX_N = 128
MAX_TEXT_CHARS = 4_000_000
"""About a million tokens.  The server answers no requests while its tokenizer runs."""
MAX_STOPS, MAX_STOP_CHARS = 64, 1024
MAX_IDS = 4096
"""Entries of ``stop_token_ids``, ``logit_bias`` and ``token_ids_logprob``: the scheduler loops over them in Python."""
MAX_LOG_PROBS = 1 << 26
"""Log-probs of one sequence; each is a Python object in four processes."""
MAX_BIAS = 1e9
MIN_REPETITION_PENALTY = 0.01
"""Logits are divided by it, and must stay finite."""
MAX_GRAMMAR_CHARS, MAX_GRAMMAR_DEPTH, MAX_REPEATS = 32_768, 64, 4096
MAX_RID_CHARS = 256
MAX_PATH_CHARS = 4096
HEALTH_CHECK = "HEALTH_CHECK"
"""A busy scheduler does not answer requests whose id starts with this."""
INT32, INT64 = 1 << 31, 1 << 63
UNREADABLE = (TypeError, AttributeError, LookupError, OverflowError, AssertionError)
"""Errors that SGLang raises by accident for a malformed request, in addition to its deliberate ValueErrors."""
LOADING = "An exception occurred while loading"
"""A RuntimeError of SGLang with these words is about a client's image, sound or video."""

# The server sets some of these later itself; the scheduler or another process would follow a client's values.
_NOT_FROM_CLIENTS = (
    "lora_id", "http_worker_ipc", "encoder_urls", "need_wait_for_mm_inputs", "num_items_assigned", "mm_data_mooncake",
    "input_embeds", "embed_overrides", "positional_embed_overrides", "session_params", "return_bytes",
)  # fmt: skip
_SET_BY_SGLANG = ("is_normalized", "stop_strs", "stop_regex_strs", "stop_str_max_len", "stop_regex_max_len")
_GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")
_OPAQUE = ("mm_inputs", "mm_data_mooncake", "time_stats")
"""Fields of a sequence that the server creates and pickles."""
_PER_SEQUENCE = ("return_logprob", "logprob_start_len", "top_logprobs_num", "lora_path", "custom_logit_processor",
                 "return_hidden_states", "bootstrap_host", "bootstrap_port", "bootstrap_room", "video_data",
                 "audio_data", "sampling_params")  # fmt: skip
_REPEATS = re.compile(r"\{\s*(\d*)\s*,?\s*(\d*)\s*\}")
_SIZES = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")


def check_request(obj: Any, *, labels: frozenset[str] = frozenset(), scores_items: bool = False) -> None:
    """Reject a request that the server could not split into sequences, or that is too large for it.

    Args:
        obj: SGLang's GenerateReqInput or EmbeddingReqInput, before SGLang processes it.
        labels: metric labels that a client may set.
        scores_items: the server runs with ``--enable-mis``, so ``multi_item_delimiter_indices`` is allowed.

    Raises:
        ValueError: names the field, its value and what is allowed.
    """
    for name in _NOT_FROM_CLIENTS:
        if getattr(obj, name, None) is not None and getattr(obj, name) is not False:
            raise ValueError(f"The request has {name}, which this engine does not take from clients. Leave it out.")
    if getattr(obj, "multi_item_delimiter_indices", None) is not None and not scores_items:
        raise ValueError("The request has multi_item_delimiter_indices; this engine was started without --enable-mis.")
    given = getattr(obj, "custom_labels", None)
    if given and set(given) != labels:
        raise ValueError(f"custom_labels are {_shown(list(given))}; this engine knows {sorted(labels)}.")
    received_s = getattr(obj, "received_time", None)
    if received_s is not None and not _is_finite(received_s):
        raise ValueError(f"received_time is {_shown(received_s)}; it must be a number of seconds.")
    prompts = _number_of_prompts(obj)
    for params in _all_params(obj, prompts):
        _check_params(params)
        n = params.get("n")
        if n is not None and not _is_int(n, 1, MAX_N + 1):
            raise ValueError(f"n is {_shown(n)}; it must be an integer from 1 to {MAX_N}.")
        if max(1, prompts) * (n or 1) > MAX_SEQUENCES:
            raise ValueError(f"{max(1, prompts)} prompts times n {n or 1} is above {MAX_SEQUENCES} sequences.")
    for name in _PER_SEQUENCE:
        values = getattr(obj, name, None)
        if isinstance(values, list) and len(values) != prompts and (prompts or not name.endswith("_data")):
            raise ValueError(f"{name} is a list of {len(values)} for {max(1, prompts)} prompts; give one, or each.")
    _check_rid(obj.rid)
    _check_media(obj)


def _number_of_prompts(obj: Any) -> int:
    """Return the number of prompts of a request; 0 for a single prompt that is not in a list.

    Raises:
        ValueError: there is no valid prompt.
    """
    given = [name for name in ("text", "input_ids") if getattr(obj, name) is not None]
    if len(given) != 1 and (given or obj.image_data is None):
        raise ValueError(f"The request has {' and '.join(given) or 'neither text nor input_ids'}; give one of them.")
    if not given:
        return 0
    value = getattr(obj, given[0])
    if isinstance(value, str):
        check_text(value)
        return 0
    if not isinstance(value, list) or not value:
        raise ValueError(f"{given[0]} is {_shown(value)}; it must be one prompt, or a list of prompts.")
    if given[0] == "text":
        parts = [part for one in value for part in (one if isinstance(one, list) else [one])]
        if not all(isinstance(part, str) for part in parts):
            raise ValueError("text is a list in which not everything is a text.")
        check_text(parts)
    elif not isinstance(value[0], list):
        return 0
    elif not all(isinstance(one, list) and one for one in value):
        raise ValueError("input_ids is a list in which not everything is a list of token ids, or one is empty.")
    return len(value)


def check_text(text: Any) -> None:
    """Reject a text, or a list of texts, that would occupy the tokenizer for minutes or is not valid Unicode.

    Raises:
        ValueError: it is longer than ``MAX_TEXT_CHARS``, or contains half of a surrogate pair.
    """
    texts = [text] if isinstance(text, str) else text if isinstance(text, list | tuple) else []
    chars = 0
    for one in texts:
        if isinstance(one, str):
            chars += len(one)
            if chars > MAX_TEXT_CHARS:
                raise ValueError(f"The prompt is longer than {MAX_TEXT_CHARS} characters; it is not tokenized.")
            one.encode()  # a UnicodeEncodeError is a ValueError


def _all_params(obj: Any, prompts: int) -> list[Mapping[str, Any]]:
    """Return the sampling parameters of a request: one object for all prompts, or one per prompt."""
    params = obj.sampling_params
    if params is None or isinstance(params, dict):
        return [params or {}]
    if not isinstance(params, list) or len(params) != prompts or not all(isinstance(one, dict) for one in params):
        raise ValueError(
            f"sampling_params is {_shown(params)}; it must be an object, or a list of one for each prompt."
        )
    if len({one.get("n") or 1 for one in params if not isinstance(one.get("n"), list | dict)}) > 1:
        raise ValueError("n must be the same in all of sampling_params.")
    return params


def _check_params(params: Mapping[str, Any]) -> None:
    """Reject sampling parameters that the server must not even read; :func:`check_sequence` checks the others."""
    for name in _SET_BY_SGLANG:
        if name in params:
            raise ValueError(f"sampling_params has {name}, which SGLang sets itself. Leave it out.")
    if params.get("stop_regex"):
        raise ValueError("stop_regex is not taken: one expression can hold up every request. Give stop strings.")
    stop = params.get("stop")
    stops = [stop] if isinstance(stop, str) else [] if stop is None else stop
    if not isinstance(stops, list) or not all(isinstance(one, str) for one in stops):
        raise ValueError(f"stop is {_shown(stop)}; it must be a text, or a list of texts.")
    check_text(stops)
    if len(stops) > MAX_STOPS or any(len(one) > MAX_STOP_CHARS for one in stops):
        raise ValueError(f"stop must be at most {MAX_STOPS} texts of at most {MAX_STOP_CHARS} characters.")
    ids = params.get("stop_token_ids")
    if ids is not None and (not isinstance(ids, list) or not all(_is_int(one, 0, INT32) for one in ids)):
        raise ValueError(f"stop_token_ids is {_shown(ids)}; it must be a list of token ids.")
    bias = params.get("logit_bias")
    if bias is not None and not isinstance(bias, dict):
        raise ValueError(f"logit_bias is {_shown(bias)}; it must be an object with token ids as keys.")
    if len(bias or ()) > MAX_IDS or len(ids or ()) > MAX_IDS:
        raise ValueError(f"logit_bias and stop_token_ids have at most {MAX_IDS} tokens.")
    for name in _GRAMMARS:
        if params.get(name) is not None:
            _check_grammar(name, params[name])


def _check_grammar(name: str, grammar: Any) -> None:
    """Reject a grammar whose compilation could exhaust memory or the stack."""
    if not isinstance(grammar, str) or len(grammar) > MAX_GRAMMAR_CHARS:
        raise ValueError(f"{name} must be a text of at most {MAX_GRAMMAR_CHARS} characters.")
    depth = deepest = 0
    for character in grammar:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    if deepest > MAX_GRAMMAR_DEPTH:
        raise ValueError(f"{name} is nested {deepest} levels deep; at most {MAX_GRAMMAR_DEPTH} are compiled.")
    repeats = math.prod(max(int(one or 1) for one in match.groups()) or 1 for match in _REPEATS.finditer(grammar))
    if name in ("json_schema", "structural_tag"):
        repeats *= math.prod(_sizes(_parsed(name, grammar)))
    if repeats > MAX_REPEATS:
        raise ValueError(f"The repetitions of {name} multiply to {repeats}; at most {MAX_REPEATS} are compiled.")


def _parsed(name: str, grammar: str) -> Any:
    try:
        return json.loads(grammar) if grammar != "$$ANY$$" else None
    except ValueError as error:
        raise ValueError(f"{name} is no JSON: {error}.") from None


def _sizes(schema: Any) -> list[int]:
    """Return the numbers of items and characters in a JSON schema."""
    found, waiting = [1], [schema]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            found += [one[key] for key in _SIZES if _is_int(one.get(key), 1, INT64)]
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one
    return found


def _check_rid(rid: Any) -> None:
    rids = [] if rid is None else rid if isinstance(rid, list) else [rid]
    for one in rids:
        if not isinstance(one, str) or not 0 < len(one) <= MAX_RID_CHARS or one.startswith(HEALTH_CHECK):
            what = f"a text of 1 to {MAX_RID_CHARS} characters that does not begin with {HEALTH_CHECK}"
            raise ValueError(f"rid is {_shown(one)}; it must be {what}.")


def _check_media(obj: Any) -> None:
    """Reject precomputed features of an image, sound or video, and paths that are not regular files.

    SGLang accepts features only from code in its own process; it fails on the lists that JSON turns them into.
    Reading a device or a pipe may never end.
    """
    items = [getattr(obj, f"{kind}_data", None) for kind in ("image", "video", "audio")]
    while items:
        item = items.pop()
        if isinstance(item, list):
            items += item
            continue
        if isinstance(item, dict) and "format" in item:
            raise ValueError(
                f"The request brings {item['format']!r} in the place of an image. Engines take images as they are: a "
                "data: URL, base64 or a path; `encoder` groups of --sglang-config compute features apart from engines."
            )
        place = item.get("url") if isinstance(item, dict) else getattr(item, "url", item)
        if isinstance(place, str) and place[:8].startswith(("/", "file://")) and len(place) < MAX_PATH_CHARS:
            path = unquote(urlparse(place).path) if place.startswith("file://") else place
            # Base64 may start with a slash too, so only existing paths that are not files are rejected.
            if os.path.exists(path) and not os.path.isfile(path):
                raise ValueError(f"{place} is no file, and cannot be read as an image, a sound or a video.")


def check_sequence(sequence: Any, vocab_size: int) -> None:
    """Check one sequence of a request, in the form in which the scheduler would get it.

    Args:
        sequence: SGLang's TokenizedGenerateReqInput or TokenizedEmbeddingReqInput.

    Raises:
        ValueError: names the field, its value and what is allowed.
    """
    from sglang.srt.managers import io_struct

    plain = copy.copy(sequence)
    for name in _OPAQUE:
        if hasattr(plain, name):
            setattr(plain, name, None)
    try:  # decodes like the scheduler, which checks the type of every field
        io_struct.msgpack_decode(io_struct.msgpack_encode(plain))
    except Exception as error:
        raise ValueError(f"A field of the request has another type than SGLang has there: {error}.") from None
    ids = numpy.frombuffer(sequence.input_ids, dtype=numpy.uint64)  # a negative id becomes a large one
    if not len(ids) or ids.max() >= vocab_size:
        _refuse_ids("input_ids", sequence.input_ids, vocab_size)
    params = sequence.sampling_params
    _check_sampling(params, vocab_size)
    for name in ("bootstrap_port", "bootstrap_room", "priority", "routed_experts_start_len"):
        value = getattr(sequence, name, None)
        low, high = (0, 65536) if name == "bootstrap_port" else (-INT64 if name == "priority" else 0, INT64)
        if value is not None and not low <= value < high:
            raise ValueError(f"{name} is {value}; it must be from {low} to {high - 1}.")
    if not hasattr(sequence, "return_logprob"):
        return
    start, top, chosen = sequence.logprob_start_len, sequence.top_logprobs_num, sequence.token_ids_logprob or ()
    if not -1 <= start < INT64:
        raise ValueError(f"logprob_start_len is {start}; it must be from -1 (the answer alone) on.")
    if not 0 <= top <= vocab_size:
        raise ValueError(f"top_logprobs_num is {top}; it must be from 0 to {vocab_size}.")
    if len(chosen) > MAX_IDS or any(not 0 <= one < vocab_size for one in chosen):
        _refuse_ids("token_ids_logprob", chosen, vocab_size)
    positions = (len(ids) - start if start >= 0 else 0) + min(params.max_new_tokens or 0, vocab_size)
    if sequence.return_logprob and (asked := positions * (1 + top + len(chosen))) > MAX_LOG_PROBS:
        raise ValueError(f"The request asks for {asked} log-probs; at most {MAX_LOG_PROBS} are given.")


def _check_sampling(params: Any, vocab_size: int) -> None:
    """Reject sampling parameters that would give the sampler NaN, infinity, or an index out of range."""
    for name in ("top_k", "max_new_tokens", "min_new_tokens"):
        value = getattr(params, name)
        if value is not None and value >= INT32:
            raise ValueError(f"{name} is {value}; it must be below {INT32}.")
    if params.repetition_penalty < MIN_REPETITION_PENALTY:
        raise ValueError(f"repetition_penalty is {params.repetition_penalty}; at least {MIN_REPETITION_PENALTY}.")
    if params.sampling_seed is not None and not -INT64 <= params.sampling_seed < INT64:
        raise ValueError(f"sampling_seed is {params.sampling_seed}; it must have 64 bits.")
    if params.stream_interval is not None and params.stream_interval < 1:
        raise ValueError(f"stream_interval is {params.stream_interval}; it must be a positive number of tokens.")
    if params.stop_token_ids and max(params.stop_token_ids) >= vocab_size:
        _refuse_ids("stop_token_ids", params.stop_token_ids, vocab_size)
    for token, bias in (params.logit_bias or {}).items():
        if not abs(bias) <= MAX_BIAS:
            raise ValueError(f"logit_bias of token {token} is {bias}; it must be from {-MAX_BIAS:g} to {MAX_BIAS:g}.")


def _refuse_ids(name: str, ids: Any, vocab_size: int) -> None:
    wrong = next((one for one in ids if not 0 <= one < vocab_size), None)
    number = f"has token {wrong}" if wrong is not None else f"has {len(ids)} tokens"
    limit = f"; at most {MAX_IDS}" if len(ids) > MAX_IDS and wrong is None else ""
    raise ValueError(f"{name} {number}; tokens are from 0 to {vocab_size - 1}, and one is the least{limit}.")


def give_own_ids(obj: Any) -> str:
    """Append a unique suffix to the ids that a client chose; return the suffix, or "" if SGLang chooses the ids.

    Two sequences with the same id in the scheduler crash the detokenizer.  A client that disconnects and retries
    causes this, because the server has then forgotten the first request.  And when a client disconnects, SGLang aborts
    every request whose id starts with that client's.
    """
    if obj.rid is None:
        return ""
    end = f"_{uuid.uuid4().hex}"
    obj.rid = [one + end for one in obj.rid] if isinstance(obj.rid, list) else obj.rid + end
    return end


def _is_int(value: Any, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value < high


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _shown(value: Any) -> str:
    return repr(value)[:200]
