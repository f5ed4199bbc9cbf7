"""What a data set holds, as digests: whether it is another one at a resume, in which field, and from which row on.

A row counts by what reaches a prompt, a grader or a tool: its ``FIELDS``.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xxhash

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
