"""Read what an engine says about a response: log-probs, kept nuclei, routed experts.

An engine answers ``/generate`` with ``{"text": ..., "meta_info": {...}}``.  Integer arrays travel in ``meta_info`` as
base64 of little-endian int32, as raw bytes, as lists or as tensors; all four are read here and nowhere else.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slime.utils.errors import DataError

TOP_P_IDS_KEYS = ("top_p_token_ids", "top_p_kept_token_ids")
TOP_P_OFFSETS_KEYS = ("top_p_token_offsets", "top_p_kept_token_offsets")
ROUTED_EXPERTS_KEY = "routed_experts"
ROUTED_EXPERTS_START_KEY = "routed_experts_start_len"


def decode_int32(value: Any, name: str = "array") -> np.ndarray:
    """A flat int32 array from base64 text, raw bytes, a list, an array or a tensor."""
    if isinstance(value, str):
        try:
            value = base64.b64decode(value, validate=True)
        except (binascii.Error, ValueError) as error:
            raise DataError(f"meta_info[{name!r}] is a string that is not base64: {error}.") from error
    if isinstance(value, (bytes, bytearray, memoryview)):
        raw = bytes(value)
        if len(raw) % 4:
            raise DataError(f"meta_info[{name!r}] has {len(raw)} bytes; int32 values need a multiple of 4.")
        return np.frombuffer(raw, dtype="<i4").astype(np.int32)  # a copy: frombuffer is read-only
    if isinstance(value, Tensor):
        value = value.detach().cpu().numpy()
    return np.array(value, dtype=np.int32).reshape(-1)


def decode_int32_meta_array(meta: Mapping[str, Any], keys: str | Sequence[str]) -> np.ndarray | None:
    """The int32 array under the first of ``keys`` that ``meta`` has with a value; None when it has none of them."""
    for key in [keys] if isinstance(keys, str) else keys:
        if meta.get(key) is not None:
            return decode_int32(meta[key], key)
    return None


def read_output_tokens(meta: Mapping[str, Any]) -> tuple[list[int], list[float]]:
    """``(token ids, log-probs)`` of the generated tokens; both empty when nothing was generated.

    ``output_token_logprobs`` is a list of ``[log_prob, token_id, ...]``.
    """
    entries = meta.get("output_token_logprobs") or []
    return [int(entry[1]) for entry in entries], [float(entry[0]) for entry in entries]


def read_top_p_spans(meta: Mapping[str, Any], num_tokens: int) -> tuple[Tensor, Tensor] | None:
    """The token ids each generated token was drawn from, as ``(ids, offsets)``; None when the engine sent none.

    Args:
        meta: the engine's ``meta_info``.
        num_tokens: generated tokens that the spans must cover.

    Returns:
        ``ids`` int32 [offsets[-1]] and ``offsets`` int32 [num_tokens + 1]: token ``t`` was drawn from
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
    if offsets[0] != 0 or offsets[-1] != len(ids) or (np.diff(offsets) < 0).any():
        raise DataError(
            f"top-p offsets run from {offsets[0]} to {offsets[-1]}; they must rise from 0 to the {len(ids)} ids sent."
        )
    return torch.from_numpy(ids), torch.from_numpy(offsets)


def extend_top_p_spans(
    spans: tuple[Any, Any] | None, new_spans: tuple[Tensor, Tensor] | None, *, num_earlier: int, num_new: int
) -> tuple[Any, Any] | None:
    """Spans of a response after ``num_new`` more tokens.

    Without ``new_spans`` the new tokens get empty spans when the response has spans already, and nothing happens
    otherwise; without ``spans`` the ``num_earlier`` tokens before them get empty ones.
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
    """Which experts each position was routed to, int32 [num_tokens - 1, num_layers, top_k]; None when not sent.

    The last token was never an input, hence the minus one.  An engine that found ``routed_experts_start_len``
    positions in its cache sends only the rows after them; ``earlier`` supplies the rest.
    """
    flat = decode_int32_meta_array(meta, ROUTED_EXPERTS_KEY)
    if flat is None:
        return None
    start = int(meta.get(ROUTED_EXPERTS_START_KEY) or 0)
    num_rows = max(0, num_tokens - 1 - start)
    if flat.size != num_rows * num_layers * top_k:
        raise DataError(
            f"meta_info['routed_experts'] has {flat.size} values; {num_tokens} tokens from position {start} on need "
            f"{num_rows} x {num_layers} layers x {top_k} experts = {num_rows * num_layers * top_k}."
        )
    rows = torch.from_numpy(flat).reshape(num_rows, num_layers, top_k)
    if start == 0:
        return rows
    if earlier is None or earlier.shape[0] < start:
        known = 0 if earlier is None else earlier.shape[0]
        raise DataError(
            f"meta_info['routed_experts_start_len'] is {start}, but the sample knows the routing of {known} positions."
        )
    return torch.cat([earlier[:start].to(torch.int32), rows])
