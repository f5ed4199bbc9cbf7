"""Payloads of ``/update_weights_from_tensor``: tensors by value, handles to flat buckets, messages to our loaders.

A message travels as the *name* of an empty tensor, because names are free text and the loader sees them; an answer
comes back through ``/get_weights_by_name`` under a name that no parameter has.
"""

from __future__ import annotations

import base64
import io
import json
import operator
import pickle
from collections.abc import Iterable
from multiprocessing.reduction import ForkingPickler
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from slime.utils.errors import WeightSyncError
from slime.weights.manifest import BucketEntry, Manifest
from slime.weights.named_tensors import NamedTensors

CHECK_REPORT = "slime.weight_check"
"""Name that asks for the problems which ``weight_check`` found since the last time."""
PUSH_REPORT = "slime.weight_receiver"
"""Name that asks for the state of the push which ``weight_receiver`` takes."""
FLATTENED_BUCKET = "flattened_bucket"
"""``load_format`` of stock SGLang for a bucket whose tensors lie in one flat buffer."""


class StockWire(Protocol):
    """SGLang's own wire format, for stock engines; the trainer's backend has it."""

    def prepare(self) -> None:
        """Make this process able to share tensors with an engine."""

    def serialize_bucket(self, bucket: NamedTensors) -> tuple[str, Tensor]:
        """Return a handle to the bucket in one fresh flat buffer, and the buffer, which must outlive the answer."""

    def flatten(self, bucket: NamedTensors) -> Tensor:
        """Return the flat buffer that a ``flattened_bucket`` broadcast carries."""

    def join_update_group(
        self,
        *,
        backend: str,
        master_address: str,
        master_port: int,
        world_size: int,
        group_name: str,
        timeout_s: float,
    ) -> dist.ProcessGroup:
        """Enter, as rank 0, the process group over which an update is broadcast."""


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


def encode(message: dict[str, Any]) -> str:
    """Return a payload that carries ``message`` (JSON) and no weights."""
    return by_value([(json.dumps(message), torch.empty(0, dtype=torch.uint8))])


def decode(named_tensors: Iterable[tuple[str, Tensor]]) -> list[dict[str, Any]]:
    """Return the messages of a payload that :func:`encode` made, as the loader sees it."""
    return [json.loads(name) for name, _ in named_tensors]


def flatten_reports(answer: Any) -> list[str]:
    """Return the strings of an answer: the server nests them once more with attention data parallelism."""
    if isinstance(answer, str):
        return [answer]
    return [text for part in answer or [] for text in flatten_reports(part)]


def named_views(flat: Tensor, entry: BucketEntry, manifest: Manifest) -> NamedTensors:
    """Return the tensors of a bucket, as views of its buffer.

    Raises:
        WeightSyncError: the bucket holds a slice of a tensor.
    """
    tensors: NamedTensors = []
    for part in entry.slices:
        whole = manifest.by_name[part.name]
        if part.slice.sizes != whole.shape:
            raise WeightSyncError(
                f"a bucket holds {list(part.slice.sizes)} of {part.name}, whose shape is {list(whole.shape)}; "
                "only our own loader takes slices"
            )
        data = flat[part.offset : part.offset + whole.num_bytes]
        tensors.append((part.name, data.view(whole.torch_dtype).view(whole.shape)))
    return tensors
