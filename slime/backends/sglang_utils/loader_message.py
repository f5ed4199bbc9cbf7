"""How the trainer's side talks to our loaders inside the engine, through endpoints that SGLang has anyway.

A question travels as the *name* of an empty tensor in ``/update_weights_from_tensor``, because names are free text and
the loader sees them; an answer comes back through ``/get_weights_by_name`` under a name that no parameter has.
Imports no SGLang: both sides read it.
"""

from __future__ import annotations

import base64
import json
import pickle
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

CHECK_REPORT = "slime.weight_check"
"""Asks for the problems that ``weight_check`` found since the last time."""
PUSH_REPORT = "slime.weight_receiver"
"""Asks for the state of the push that ``weight_receiver`` takes."""
RECEIVER = "slime.backends.sglang_utils.weight_receiver.receive"
"""``load_format`` that hands a message to ``weight_receiver``; ``--custom-weight-loader`` makes a server know it."""


def by_value(named_tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Tensors themselves, as a payload of ``/update_weights_from_tensor``."""
    return base64.b64encode(pickle.dumps(list(named_tensors), protocol=4)).decode("ascii")


NOTHING = by_value([])
"""A payload for loaders that need no tensors."""


def encode(message: dict[str, Any]) -> str:
    """A payload that carries ``message`` (JSON) and no weights."""
    return by_value([(json.dumps(message), torch.empty(0, dtype=torch.uint8))])


def decode(named_tensors: Iterable[tuple[str, Tensor]]) -> list[dict[str, Any]]:
    """The messages of a payload that :func:`encode` made, as the loader sees it."""
    return [json.loads(name) for name, _ in named_tensors]


def flatten_reports(answer: Any) -> list[str]:
    """The strings of an answer: the server nests them once more with attention data parallelism."""
    if isinstance(answer, str):
        return [answer]
    return [text for part in answer or [] for text in flatten_reports(part)]
