"""Files with the state of the rollout side at a checkpoint: the data position and the position in the ledger.

A line with a digest, then what ``plain_values.dumps`` wrote: JSON, or safetensors where there are arrays.  Earlier
versions wrote what ``torch.save`` does; that is read without running code (``slime.utils.safe_pickle``).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from slime.rollout import plain_values
from slime.utils import safe_pickle
from slime.utils.atomic_file import write_atomically
from slime.utils.errors import DataError
from slime.utils.outside_file import read_outside_file

REMEDY = "Load an earlier checkpoint with --ckpt-step, or copy the file again."
_MARK = b"slime xxh3 "
_SEAL_BYTES = len(_MARK) + 16
_END_BYTES = 22
"""Of a zip archive, whose comment was the digest in files of earlier versions."""


def write_state(path: Path, state: Mapping[str, Any], *, what: str) -> None:
    """Write plain values, arrays and tensors, whole or not at all; objects of classes are left out, with a warning.

    Args:
        path: of the file.
        state: the content.
        what: the content, for errors.
    """
    body = plain_values.dumps(dict(state), warning=f"{what} is stored without")
    write_atomically(path, lambda file: file.write(_head(body) + body), what=what)


def _head(body: bytes) -> bytes:
    return b'{"format": "slime state", "xxh3": "%s"}\n' % xxhash.xxh3_64_hexdigest(body).encode()


def read_state(path: Path, *, what: str) -> dict[str, Any]:
    """Return what ``write_state`` or an earlier version wrote.

    Raises:
        DataError: it is cut, damaged, or asks for more than plain data.
    """
    try:
        data = read_outside_file(path, max_bytes=safe_pickle.MAX_BYTES)
    except DataError as error:
        raise DataError(f"{what} cannot be read: {error} {REMEDY}") from error
    if data.startswith(b"PK"):
        is_whole = data[-_END_BYTES:].startswith(b"PK\5\6") or data.endswith(_seal(data[:-_SEAL_BYTES]))
    else:
        head, newline, body = data.partition(b"\n")
        is_whole = data.startswith(b"\x80") or head + newline == _head(body)
        data = data if data.startswith(b"\x80") else body
    if not is_whole:
        raise DataError(f"{what} {path} cannot be read: its {len(data)} bytes are cut or damaged. {REMEDY}")
    state = plain_values.loads(data, where=path, remedy=REMEDY)
    if not isinstance(state, dict):
        raise DataError(f"{what} {path} holds a {type(state).__name__}, where a dict is expected. {REMEDY}")
    return state


def _seal(body: bytes) -> bytes:
    return _MARK + xxhash.xxh3_64_hexdigest(body).encode()
