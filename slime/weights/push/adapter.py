"""The push of an adapter alone, which engines take without a pause.

An engine holds the last two adapters.  A request runs on the one that was the last when it began, so that a push waits
for requests that began before the push before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from slime.weights.manifest import Manifest
from slime.weights.push.state import Push, PushReport
from slime.weights.push.verbs import EngineProxy, Pending
from slime.weights.push.wire import StockWire, as_text

ADAPTER_PREFIX = "slime-"
"""An adapter is called by this and its version, for engines."""

_ENGINE_NAMES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
"""Last name of a module in Mixtral's layout -> the one by which engines know its adapter."""


def as_engines_call(module: str) -> str:
    """Return a module's name, or that of its adapter's tensor, as engines have it."""
    return ".".join(_ENGINE_NAMES.get(part, part) for part in module.split("."))


def push_adapter(push: Push, tensors: Mapping[str, Tensor], config: Mapping[str, Any], wire: StockWire) -> PushReport:
    """Have the engines serve an adapter under the version of the push; collective.

    Args:
        push: new; afterwards its participants say which engines were excluded and why.
        tensors: by PEFT's names; rank 0 has them all.
        config: the content of PEFT's adapter_config.json.
        wire: SGLang's form of tensors in shared memory.

    Raises:
        WeightSyncError: no engine took it.
    """

    def load() -> None:
        on_host = [(name, tensor.cpu()) for name, tensor in tensors.items()]
        near = [
            one for one in push.participants.good if one.is_colocated and one.gpu_offset < push.ranks.ranks_per_host
        ]
        handle, kept = _shared(on_host, wire) if near else ("", None)
        text = as_text(dict(on_host)) if len(near) < len(push.participants.good) else ""

        def ask(engine: EngineProxy) -> Pending:
            payload = (handle, True) if engine in near else (text, False)
            return engine.load_adapter(push.version, dict(config), *payload)

        push.participants.ask("loading the adapter", ask)
        del kept  # engines have mapped it until here

    with push.step("adapter"):
        push.on_main_rank(f"loading the adapter of version {push.version}", load)
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    return replace(push.report(Manifest((), ())), num_tensors=len(tensors), num_bytes=num_bytes)


def _shared(tensors: list[tuple[str, Tensor]], wire: StockWire) -> tuple[str, Tensor]:
    wire.prepare()
    sharing: Any = torch.multiprocessing
    strategy = sharing.get_sharing_strategy()
    sharing.set_sharing_strategy("file_system")  # descriptors pass between relatives only
    try:
        return wire.serialize_bucket(tensors)
    finally:
        sharing.set_sharing_strategy(strategy)
