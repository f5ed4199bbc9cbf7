"""Files with the state of the rollout side at a checkpoint: the data position and the position in the ledger.

What ``torch.save`` writes, with a digest of its bytes as the comment of the zip archive; ``torch.load`` reads it, too.
They are read without running code (``slime.utils.safe_pickle``), whoever wrote them.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash

from slime.utils.atomic_file import write_atomically
from slime.utils.errors import DataError
from slime.utils.safe_pickle import load_pickle, load_torch

logger = logging.getLogger(__name__)

_MARK = b"slime xxh3 "
_SEAL_BYTES = len(_MARK) + 16
_END_OF_ZIP = b"PK\x05\x06"
_END_BYTES = 22
_LEFT_OUT = object()
REMEDY = "Load an earlier checkpoint with --ckpt-step, or copy the file again."


def write_state(path: Path, state: Mapping[str, Any], *, what: str) -> None:
    """Write plain values and tensors, whole or not at all; values that could not be read back are left out.

    Args:
        path: of the file.
        state: the content.
        what: the content, for errors.
    """
    data = _packed(dict(state))
    if not _is_readable(data):
        left_out: set[str] = set()
        data = _packed(_readable(dict(state), what, left_out))
        logger.warning("%s is stored without %s: objects of classes are not read back.", what, ", ".join(left_out))
    body = data[:-2] + _SEAL_BYTES.to_bytes(2, "little")  # the length of the archive's comment
    write_atomically(path, lambda file: file.write(body + _seal(body)), what=what)


def _packed(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _is_readable(data: bytes) -> bool:
    try:
        load_torch(data, where="")
    except DataError:
        return False
    return True


def _readable(value: Any, name: str, left_out: set[str]) -> Any:
    """Return the part of a value that can be read back."""
    if _is_readable(_packed(value)):
        return value
    if isinstance(value, dict):
        parts = {key: _readable(item, str(key), left_out) for key, item in value.items()}
        return {key: part for key, part in parts.items() if part is not _LEFT_OUT}
    if isinstance(value, list) and all(isinstance(item, dict | list) for item in value):
        return [_readable(item, name, left_out) for item in value]
    left_out.add(name)
    return _LEFT_OUT


def _seal(body: bytes) -> bytes:
    return _MARK + xxhash.xxh3_64_hexdigest(body).encode()


def read_state(path: Path, *, what: str) -> dict[str, Any]:
    """Return what ``write_state`` or an earlier version wrote.

    Raises:
        DataError: it is cut, damaged, or asks for more than plain data.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"{what} {path} cannot be read ({error.strerror}). {REMEDY}") from error
    if data[:1] == b"\x80":
        state = load_pickle(data, where=path, remedy=REMEDY)
    else:
        _check_seal(data, f"{what} {path}")
        state = load_torch(data, where=path, remedy=REMEDY)
    if not isinstance(state, dict):
        raise DataError(f"{what} {path} holds a {type(state).__name__}, where a dict is expected. {REMEDY}")
    return state


def _check_seal(data: bytes, where: str) -> None:
    """Check the digest; files of earlier versions have none."""
    body, seal = data[:-_SEAL_BYTES], data[-_SEAL_BYTES:]
    if data[-_END_BYTES:].startswith(_END_OF_ZIP) and data[-2:] == b"\0\0":
        return
    if seal != _seal(body):
        raise DataError(f"{where} cannot be read: its {len(data)} bytes are cut short or damaged. {REMEDY}")
