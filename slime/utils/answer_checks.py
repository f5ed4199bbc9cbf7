"""Checks of an engine's answer to ``/generate``, before anything of it becomes part of a sample.

An engine that is broken, or has another version of the protocol, may answer with status 200 and numbers that would
train in silence.  What is found here is treated as a failure of the engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slime.utils.sglang_meta import TokenLogProbs

MAX_LOG_PROB = 1e-3
"""A log-prob is at most 0; the rounding of an engine may add a little."""
MIN_LOG_PROB = -1e30
"""Less is minus infinity in float32."""
MAX_TOKEN = 2**31 - 1
MAX_TEXT_PER_TOKEN = 4096
"""Characters; the longest tokens of today's vocabularies have a few hundred."""
MAX_VERSION_LENGTH = 200
_LOOK_AT_LOG = "Look at the log of the engine."


def problem_with_answer(output: Any, payload: Mapping[str, Any]) -> str | None:
    """Return why an answer cannot be used, with the field and its value; None when it can.

    Args:
        output: decoded.
        payload: body of the request; empty where it is not known.
    """
    if not isinstance(output, dict) or not isinstance(output.get("meta_info"), dict):
        return (
            f"it is {str(output)[:300]!r}; /generate must give an object with 'text' and 'meta_info'. Look at the log "
            "of the engine or the router."
        )
    meta = output["meta_info"]
    if not isinstance(meta.get("finish_reason"), dict):
        return f"it has no finish_reason: {str(meta)[:300]}. {_LOOK_AT_LOG}"
    if not isinstance(meta["finish_reason"].get("type"), str | None):
        return f"its finish_reason is {_shown(meta['finish_reason'])}, whose type must be a text. {_LOOK_AT_LOG}"
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
    """Return what is wrong with one of the ``[log_prob, token_id, ...]``."""
    if isinstance(entries, TokenLogProbs):
        try:
            low, high = min(entries.log_probs, default=0), max(entries.log_probs, default=0)
            if MIN_LOG_PROB <= low and high <= MAX_LOG_PROB and max(entries.ids, default=0) <= MAX_TOKEN:
                return None  # the ids were checked when the text was parsed
        except TypeError:
            pass  # a log-prob is missing; which one is found below
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
    """Return which entry of ``meta_info`` is of a type that it never has."""
    for name in _COUNTS:
        value = meta.get(name) or 0
        if type(value) is not int or value < 0:
            return f"meta_info[{name!r}] is {_shown(value)}; it must be a whole number from 0 on."
    version = meta.get("weight_version")
    if version is not None and (type(version) not in (str, int) or len(str(version)) > MAX_VERSION_LENGTH):
        return f"meta_info['weight_version'] is {_shown(version)}; it must be a short text or a number."
    return None


def _problem_with_counts(
    output: Mapping[str, Any], meta: Mapping[str, Any], payload: Mapping[str, Any], num_tokens: int
) -> str | None:
    """Return which number or length of the answer does not fit its tokens or the request."""
    limit = (payload.get("sampling_params") or {}).get("max_new_tokens")
    if isinstance(limit, int) and num_tokens > limit:
        return f"it has {num_tokens} tokens; max_new_tokens of the request is {limit}."
    # An aborted request, and one drafted by another model, may be counted before its last tokens are listed.
    is_counted = meta["finish_reason"].get("type") != "abort" and "spec_verify_ct" not in meta
    completion = meta.get("completion_tokens")
    if is_counted and completion is not None and completion != num_tokens:
        return (
            f"meta_info['completion_tokens'] is {_shown(completion)}, and output_token_logprobs has {num_tokens} "
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
        return f"output_ids has {count} entries, and output_token_logprobs {num_tokens}; both list the new tokens."
    text = output.get("text")
    if text is not None and not isinstance(text, str):
        return f"its text is {_shown(text)}; it must be a string."
    if text and len(text) > MAX_TEXT_PER_TOKEN * num_tokens:
        return f"its text has {len(text)} characters for {num_tokens} tokens ({_shown(text)})."
    return None


def _shown(value: Any) -> str:
    return repr(value[:80] if isinstance(value, str | list) else value)[:200]
