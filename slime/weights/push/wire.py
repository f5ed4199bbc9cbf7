"""Payloads of ``/update_weights_from_tensor``: tensors by value, and handles to their memory."""

from __future__ import annotations

import base64
import io
import operator
import pickle
from collections.abc import Iterable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor

FLATTENED_BUCKET = "flattened_bucket"
"""``load_format`` of stock SGLang for a bucket whose tensors lie in one flat buffer."""


def by_value(named_tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return the tensors themselves as text: slow, but it reaches an engine on any host."""
    return as_text([(name, tensor.cpu()) for name, tensor in named_tensors])


def as_text(content: Any) -> str:
    """Return tensors in host memory, in lists or dicts, by value."""
    buffer = io.BytesIO()
    _ByValue(buffer, protocol=4).dump(content)
    return base64.b64encode(buffer.getvalue()).decode("ascii")


class _ByValue(pickle.Pickler):
    """Pickler that sends of a view only what it shows, where torch would send the whole memory below each view.

    Eight-bit floats go as bytes with a change of view: torch cannot read back what it pickles.
    """

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Tensor) and obj.untyped_storage().nbytes() > obj.nbytes:
            return operator.methodcaller("view", obj.shape), (obj.detach().flatten().clone(),)
        if isinstance(obj, Tensor) and obj.is_floating_point() and obj.element_size() == 1:
            return operator.methodcaller("view", obj.dtype), (obj.contiguous().view(torch.uint8),)
        return NotImplemented


NOTHING = by_value([])
"""A payload for loaders that need no tensors."""


def handle_of(content: Any) -> str:
    """Return tensors as handles to their shared or CUDA memory, which must outlive the engine's answer.

    A tensor in ordinary memory moves to shared memory.
    """
    data = io.BytesIO()
    ForkingPickler(data).dump(content)
    return base64.b64encode(data.getvalue()).decode("ascii")
