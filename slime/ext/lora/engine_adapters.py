"""The push of an adapter alone (``--lora-push adapter``), which engines take without a pause.

A request runs on the adapter that was the last when it began.  An engine holds two at most: after a push the one
before goes when its requests have ended, for which the next push waits.  The engine that has rank 0's GPU alone is
handed memory of it, others there memory of the host.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from slime.backends.sglang_utils.server_control import NoAnswer
from slime.backends.sglang_utils.weight_verbs import WeightVerbs
from slime.weights.push.engine import EngineProxy, Pending
from slime.weights.push.state import Push, PushReport
from slime.weights.push.wire import as_text, handle_of

logger = logging.getLogger(__name__)

ADAPTER_PREFIX = "slime-"
"""An adapter is called by this and its version, for engines."""

ON_CARD, ON_HOST, BY_VALUE = "on the card", "on the host", "by value"
"""How an engine gets an adapter: through memory of its GPU or of its host, or as text."""

IN_ONE_BUFFER = "slime_adapter"
"""``load_format`` by which our plugin takes a handle to a flat buffer, and names and shapes of the tensors in it."""

Shapes = Sequence[tuple[str, tuple[int, ...]]]

_ENGINE_NAMES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
"""Last name of a module in Mixtral's layout -> the one by which engines know its adapter."""


@cache
def as_engines_call(module: str) -> str:
    """Return a module's name, or that of its adapter's tensor, as engines have it."""
    return ".".join(_ENGINE_NAMES.get(part, part) for part in module.split("."))


def push_adapter(
    push: Push,
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype,
    config: Mapping[str, Any],
    prepare: Callable[[], None],
) -> PushReport:
    """Have the engines serve an adapter under the version of the push; collective.

    Args:
        push: new; afterwards its participants say which engines were excluded and why.
        tensors: by PEFT's names, of one dtype, on the GPU or on the host; rank 0 has them all.
        dtype: that engines get.
        config: the content of PEFT's adapter_config.json.
        prepare: makes this process able to share tensors.

    Raises:
        WeightSyncError: no engine took it.
    """

    def load() -> None:
        forms = {one.index: _form_for(one, push, tensors) for one in push.participants.good}
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors.values()]).to(dtype)
        shapes = [(name, tuple(tensor.shape)) for name, tensor in tensors.items()]
        made = {form: _payload(form, flat, shapes, prepare) for form in set(forms.values())}

        def ask(engine: EngineProxy) -> Pending:
            text, _ = made[forms[engine.index]]
            return engine.run(load_adapter, push.version, dict(config), text, forms[engine.index] != BY_VALUE)

        push.participants.ask("loading the adapter", ask)
        made.clear()  # engines have mapped the buffers until here

    with push.step("adapter"):
        push.on_main_rank(f"loading the adapter of version {push.version}", load)
    num_bytes = sum(tensor.numel() for tensor in tensors.values()) * dtype.itemsize
    return push.report(num_tensors=len(tensors), num_buckets=0, num_bytes=num_bytes)


def named_parts(flat: Tensor, shapes: Shapes) -> dict[str, Tensor]:
    """Return the tensors that lie in ``flat`` one behind the other."""
    parts = flat.split_with_sizes([math.prod(shape) for _, shape in shapes])
    return {name: part.view(*shape) for (name, shape), part in zip(shapes, parts, strict=True)}


def _form_for(engine: EngineProxy, push: Push, tensors: Mapping[str, Tensor]) -> str:
    """Return how an engine gets the tensors: one that has rank 0's GPU alone maps them where they are, and one with a
    GPU on another host cannot open memory of this one.
    """
    if not (engine.is_colocated and engine.gpus.stop <= push.ranks.ranks_per_host):
        return BY_VALUE
    is_on_card = engine.gpus == range(1) and not any(one.is_cpu for one in tensors.values())
    return ON_CARD if is_on_card else ON_HOST


def _payload(form: str, flat: Tensor, shapes: Shapes, prepare: Callable[[], None]) -> tuple[str, Tensor]:
    """Return the tensors' text or handle, and the buffer that must outlive the engines' answers."""
    held = flat if form == ON_CARD else flat.cpu()
    if form == BY_VALUE:
        # Copies: with a part torch would send the whole buffer.
        return as_text({name: part.clone() for name, part in named_parts(held, shapes).items()}), held
    prepare()
    sharing: Any = torch.multiprocessing
    strategy = sharing.get_sharing_strategy()
    sharing.set_sharing_strategy("file_system")  # descriptors pass between relatives only
    try:
        return handle_of((held, shapes)), held
    finally:
        sharing.set_sharing_strategy(strategy)


# Where the engine's actor runs


@dataclass
class ServedAdapters:
    """What an engine's actor knows of the adapters in its server."""

    server: Any
    """The connection to it; another one begins without adapters."""
    name: str | None = None
    """Of the adapter that requests run with."""
    unloading: Future[None] | None = None
    """The end of the adapter before, which waits for its requests."""


def served_adapters(engine: WeightVerbs) -> ServedAdapters:
    """Return the state of an engine's present server."""
    server, held = vars(engine).get("server"), vars(engine).get("_served_adapters")
    if held is None or held.server is not server:
        held = vars(engine)["_served_adapters"] = ServedAdapters(server)
    return held


def load_adapter(
    engine: WeightVerbs, weight_version: str, config: dict[str, Any], tensors: str, is_handle: bool
) -> None:
    """Run requests that begin from now on with an adapter; the one before goes when its requests have ended.

    Args:
        is_handle: the tensors lie in one buffer of shared memory, as :data:`IN_ONE_BUFFER` says.
    """
    name, held = f"{ADAPTER_PREFIX}{weight_version}", served_adapters(engine)
    if held.name == name:
        return  # a resend, which only another engine missed
    _finish_unloading(engine, held)
    adapter = {"lora_name": name, "config_dict": config, "serialized_tensors": tensors}
    load_format = {"load_format": IN_ONE_BUFFER} if is_handle else {}
    engine.post("/load_lora_adapter_from_tensors", adapter | load_format)
    old, held.name = held.name, name  # our plugin serves it from now on
    if old is not None:
        pool = ThreadPoolExecutor(1, thread_name_prefix="unload adapters")
        held.unloading = pool.submit(engine.post, "/unload_lora_adapter", {"lora_name": old})  # waits for its requests
        pool.shutdown(wait=False)


def _finish_unloading(engine: WeightVerbs, held: ServedAdapters) -> None:
    """Wait for the requests of the adapter that the last push took out of use."""
    unloading, held.unloading = held.unloading, None
    try:
        if unloading is not None:
            unloading.result(engine.args.weight_update_timeout_s)
    except (NoAnswer, TimeoutError):
        logger.info("Engine %d: requests of an old adapter still run; the new one waits in its queue", engine.rank)
