"""What ``/weights_checker`` does, as weight loaders: SGLang's own wants CUDA."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from slime.backends.sglang_utils.loader_report import reporting

ACTIONS = {
    "snapshot": f"{__name__}.snapshot_weights",
    "reset_tensors": f"{__name__}.reset_weights",
    "compare": f"{__name__}.compare_with_snapshot",
}
"""Action of ``check_weights`` -> loader."""


def snapshot_weights(model: nn.Module, _: Iterable[Any]) -> None:
    """Keep a copy of every parameter for :func:`compare_with_snapshot`."""
    with reporting(model):
        vars(model)["_slime_snapshot"] = {name: p.data.clone() for name, p in model.named_parameters()}


def reset_weights(model: nn.Module, _: Iterable[Any]) -> None:
    """Overwrite every floating-point parameter with NaN."""
    with reporting(model), torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.data.fill_(torch.nan)


def compare_with_snapshot(model: nn.Module, _: Iterable[Any]) -> None:
    """Report the parameters that differ from the snapshot."""
    with reporting(model) as problems:
        snapshot = vars(model).get("_slime_snapshot")
        if snapshot is None:
            problems.append("there is no snapshot to compare with")
            return
        for name, parameter in model.named_parameters():
            held, kept = (one.contiguous().view(-1).view(torch.uint8) for one in (parameter.data, snapshot[name]))
            if not torch.equal(held, kept):
                problems.append(name)
