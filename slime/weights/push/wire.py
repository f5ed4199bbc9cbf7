"""Payloads of ``/update_weights_from_tensor``: tensors by value or as handles to their memory."""

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
"""Stock SGLang's ``load_format`` for a bucket whose tensors lie in one flat buffer."""


def by_value(named_tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Serialize tensors by value as text: slow, but works for an engine on any host."""
    return as_text([(name, tensor.cpu()) for name, tensor in named_tensors])


def as_text(content: Any) -> str:
    """Serialize host tensors, possibly in lists or dicts, by value as base64 text."""
    buffer = io.BytesIO()
    _ByValue(buffer, protocol=4).dump(content)
    return base64.b64encode(buffer.getvalue()).decode("ascii")


class _ByValue(pickle.Pickler):
    """Pickler that sends only a view's own elements; torch would send the view's whole storage.

    8-bit floats are sent as bytes and viewed on arrival, because torch cannot unpickle them.
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
    """Serialize tensors as handles to shared or CUDA memory, which must stay alive until the engine has answered.

    A tensor in ordinary host memory is moved to shared memory.
    """
    data = io.BytesIO()
    ForkingPickler(data).dump(content)
    return base64.b64encode(data.getvalue()).decode("ascii")
