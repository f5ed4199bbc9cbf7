"""Single values of a sample or of metrics as pickles, and back without running code."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch

from slime.utils.safe_pickle import load_pickle, load_torch

_NESTED_TENSOR = b"_load_from_bytes"
"""The function that a plain pickle of a tensor asks for, which could read anything; ``torch.save`` does without."""


def try_dumps(value: Any, *, attempts: int = 3) -> bytes | None:
    """Return a pickle for this process to read, or None.  A dict that another thread fills is tried again."""
    for _ in range(attempts):
        try:
            return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
        except RuntimeError:
            continue
        except Exception:  # Anything may be raised: the objects are the user's.
            return None
    return None


def try_pickle(value: Any) -> bytes | None:
    """Return a pickle for ``load_value``; None when the value cannot be pickled."""
    data = try_dumps(value)
    if data is None or _NESTED_TENSOR not in data:
        return data
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def load_value(data: bytes, *, where: str) -> Any:
    """Return the value that ``try_pickle`` wrote.

    Raises:
        DataError: it is damaged, or an object of a class that is not plain data.
    """
    return (load_torch if data.startswith(b"PK") else load_pickle)(data, where=where)
