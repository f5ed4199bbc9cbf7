"""Messages to our loaders inside an engine, as payloads of ``/update_weights_from_tensor``.

A message travels as the *name* of an empty tensor, because names are free text and the loader sees them; an answer
comes back through ``/get_weights_by_name`` under a name that no parameter has.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from slime.weights.push.engine import EngineProxy
from slime.weights.push.wire import by_value

RECEIVER = "slime.ext.fast_push.weight_receiver.receive"
"""``load_format`` of our loader, which takes the verbs of a two-phase push; see ``--custom-weight-loader``."""
RECEIVER_BEFORE = "slime.backends.sglang_utils.weight_receiver.receive"
"""The name under which engines of others may have it."""
COMPARE = "slime.ext.fast_push.weight_check.compare_weights"
"""Loader that compares what it is sent with what the engine holds."""
FILL_WITH_NAN = "slime.ext.fast_push.weight_check.fill_with_nan"
FIND_NAN = "slime.ext.fast_push.weight_check.find_nan"
"""Loader that reports what was not written since :data:`FILL_WITH_NAN`."""
WEIGHT_LOADERS = (COMPARE, FILL_WITH_NAN, FIND_NAN, RECEIVER)
"""Import paths that an update request may name as its ``load_format``, in engines that slime starts."""
OUR_LOADERS = (RECEIVER, RECEIVER_BEFORE)
PUSH_REPORT = "slime.weight_receiver"
"""Name that asks for the state of the push which ``weight_receiver`` takes."""


def loader_of(engine: EngineProxy) -> str | None:
    """Return the name under which an engine has our loader; None for an engine without it."""
    return next((name for name in OUR_LOADERS if name in engine.loaders), None)


def encode(message: dict[str, Any]) -> str:
    """Return a payload that carries ``message`` (JSON) and no weights."""
    return by_value([(json.dumps(message), torch.empty(0, dtype=torch.uint8))])


def decode(named_tensors: Iterable[tuple[str, Tensor]]) -> list[dict[str, Any]]:
    """Return the messages of a payload that :func:`encode` made, as the loader sees it."""
    return [json.loads(name) for name, _ in named_tensors]
