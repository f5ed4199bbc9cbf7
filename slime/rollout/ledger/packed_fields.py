"""The fields of a sample that are packed instead of pickled, and how.

Token ids are int32, masks one byte, log-probs float32 (as the engine computed them).
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, NamedTuple


def _pack_ints(values: list[int]) -> bytes:
    return struct.pack(f"<{len(values)}i", *values)


def _pack_floats(values: list[float]) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


class Packing(NamedTuple):
    """How a list of numbers, or a text, is packed."""

    pack: Callable[[Any], bytes]
    unpack: Callable[[bytes], Any]
    width: int


def _unpacker(code: str, width: int) -> Callable[[bytes], list[Any]]:
    return lambda data: list(struct.unpack(f"<{len(data) // width}{code}", data))


PACKED = {
    "tokens": Packing(_pack_ints, _unpacker("i", 4), 4),
    "rollout_log_probs": Packing(_pack_floats, _unpacker("f", 4), 4),
    "teacher_log_probs": Packing(_pack_floats, _unpacker("f", 4), 4),
    "loss_mask": Packing(bytes, list, 1),
    "response": Packing(str.encode, bytes.decode, 1),
}
LISTS_OF_NUMBERS = ("tokens", "rollout_log_probs", "loss_mask", "teacher_log_probs")
PACK_ERRORS = (struct.error, TypeError, ValueError, OverflowError, UnicodeError)
