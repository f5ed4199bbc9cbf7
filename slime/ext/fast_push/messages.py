"""Messages to slime's loaders inside an engine, as payloads of ``/update_weights_from_tensor``.

A message is sent as the *name* of an empty tensor, because names are free text that the loader sees.  An answer comes
back through ``/get_weights_by_name`` under a name that no parameter has.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from slime.weights.push.wire import by_value

PUSH_REPORT = "slime.weight_receiver"
"""Name that requests the state of the push in ``weight_receiver``."""


def encode(message: dict[str, Any]) -> str:
    """Return a payload that carries ``message`` as JSON and no weights."""
    return by_value([(json.dumps(message), torch.empty(0, dtype=torch.uint8))])


def decode(named_tensors: Iterable[tuple[str, Tensor]]) -> list[dict[str, Any]]:
    """Return the messages in a payload made by :func:`encode`, given what the loader receives."""
    return [json.loads(name) for name, _ in named_tensors]
