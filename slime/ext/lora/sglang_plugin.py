"""Hooks in SGLang's processes for adapters that are pushed (``--lora-push adapter``).

A request that names no adapter runs on the one pushed last, whose version is served as soon as it is loaded.  Adapters
stay in the memory that they came in.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from functools import cache
from typing import Any

import torch

from slime.backends.sglang_utils.hooks import register_hooks
from slime.ext.lora.engine_adapters import ADAPTER_PREFIX, IN_ONE_BUFFER, named_parts

_GATED = "_slime_gated_layers"
"""Attribute of an engine's model: see :func:`_gated_layers`."""
_running: Counter[str | None] = Counter()
"""Requests under way, by the id of their adapter."""
LOST_COUNT_S = 5.0
"""An adapter without requests for so long has none in the scheduler either, which aborts within a step."""
_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
_ADAPTER = "sglang.srt.lora.lora.LoRAAdapter"


def register() -> None:
    """Register the hooks; again: no effect."""
    register_hooks(
        (target, hook, "around")
        for target, hook in (
            (f"{_MANAGER}.generate_request", _generate),
            ("sglang.srt.lora.lora_registry.LoRARegistry.wait_for_unload", _wait_for_unload),
            (f"{_MANAGER}.load_lora_adapter_from_tensors", _serve_adapter),
            ("sglang.srt.managers.tp_worker.BaseTpWorker.load_lora_adapter_from_tensors", _read_adapter),
            (f"{_ADAPTER}._build_moe_gated_map", _gated_layers),
            (f"{_ADAPTER}.initialize_weights_from_tensors", _take_adapter),
            ("sglang.srt.model_executor.model_runner.ModelRunner.unload_lora_adapter", _unload_adapter),
        )
    )


async def _generate(original: Callable[..., Any], manager: Any, obj: Any, request: Any = None) -> AsyncIterator[Any]:
    version = _choose_adapter(manager, obj)
    async with _counted(_lora_id(manager, obj)), aclosing(original(manager, obj, request)) as answers:
        async for answer in answers:
            for one in answer if isinstance(answer, list) else [answer]:
                if version is not None and isinstance(one, dict) and isinstance(one.get("meta_info"), dict):
                    one["meta_info"]["weight_version"] = version
            yield answer


def _choose_adapter(manager: Any, obj: Any) -> str | None:
    """Let a request that names no adapter run on the one pushed last; return the version of this adapter.

    So clients need not know of adapters, and a request ends under the version that it began with.
    """
    if not manager.server_args.enable_lora or str(obj.rid).startswith("HEALTH_CHECK"):
        return None
    version: str = manager.server_args.weight_version
    last = f"{ADAPTER_PREFIX}{version}"
    if obj.lora_path is None and any(
        one.lora_name == last for one in manager.lora_registry.get_all_adapters().values()
    ):
        obj.lora_path = last
    return version if obj.lora_path == last else None


@asynccontextmanager
async def _counted(lora_id: str | None) -> AsyncIterator[None]:
    _running[lora_id] += 1
    try:
        yield
    finally:
        _running[lora_id] -= 1


def _lora_id(manager: Any, obj: Any) -> str | None:
    adapters = manager.lora_registry.get_all_adapters() if manager.server_args.enable_lora else {}
    return adapters[obj.lora_path].lora_id if isinstance(obj.lora_path, str) and obj.lora_path in adapters else None


async def _wait_for_unload(original: Callable[..., Any], registry: Any, lora_id: str) -> None:
    """Wait for the requests of an adapter by our own count too, and some seconds more.

    SGLang never counts down those that end before or outside its scheduler: refused prompts, its health check.
    """
    waiting = asyncio.ensure_future(original(registry, lora_id))
    idle_since_s = time.monotonic()
    while not waiting.done():
        await asyncio.wait([waiting], timeout=0.1)
        if _running[lora_id]:
            idle_since_s = time.monotonic()
        elif time.monotonic() - idle_since_s > LOST_COUNT_S:
            waiting.cancel()
            registry._counters.pop(lora_id, None)
            break
    _running.pop(lora_id, None)


async def _serve_adapter(original: Callable[..., Any], manager: Any, request: Any, *args: Any) -> Any:
    """Load an adapter, and serve one of a push as its version at once: a push needs no second request for that."""
    result = await original(manager, request, *args)
    if result.success and request.lora_name.startswith(ADAPTER_PREFIX):
        manager.server_args.weight_version = request.lora_name.removeprefix(ADAPTER_PREFIX)
    return result


def _read_adapter(original: Callable[..., Any], worker: Any, request: Any) -> Any:
    """Read an adapter in one buffer.  SGLang's own bucket describes each tensor by an object, and its process has not
    been prepared to map memory of a GPU, as it is for weights.
    """
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

    monkey_patch_torch_reductions()
    if request.load_format != IN_ONE_BUFFER:
        return original(worker, request)
    tensors = named_parts(*MultiprocessingSerializer.deserialize(request.serialized_tensors))
    return worker.model_runner.load_lora_adapter_from_tensors(
        request.to_ref(), tensors, request.config_dict, request.added_tokens_config
    )


def _take_adapter(original: Callable[..., None], adapter: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Leave an adapter that came in memory of the GPU on the GPU: SGLang takes each tensor to the host, and all of
    them back with the first batch.
    """
    layers = {name: _layer_of(name) for name in tensors}
    if None in layers.values():
        original(adapter, tensors)
        return
    held = [layer.weights for layer in adapter.layers]
    for name, tensor in tensors.items():
        held[layers[name]][name] = tensor
    adapter._normalize_weights()  # joins some of them, in memory of its own
    ids = {id(tensor) for tensor in tensors.values() if not tensor.is_cpu}  # with the answer the trainer frees them
    lent = {name: one for weights in held for name, one in weights.items() if id(one) in ids}
    if lent:  # in one copy: a launch for each takes longer
        shapes = [(name, one.shape) for name, one in lent.items()]
        own = named_parts(torch.cat([one.view(-1) for one in lent.values()]), shapes)
        for weights in held:
            weights.update({name: own[name] for name in weights if name in own})
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()


@cache  # pushes repeat
def _layer_of(name: str) -> Any:
    from sglang.srt.layers.utils import get_layer_id

    return get_layer_id(name)


def _gated_layers(original: Callable[..., dict[int, bool]], model: torch.nn.Module) -> dict[int, bool]:
    """Return which layers have gated experts, found once: SGLang walks over all modules of the model each time."""
    held = vars(model)
    if _GATED not in held:
        held[_GATED] = original(model)
    found: dict[int, bool] = held[_GATED]
    return found


def _unload_adapter(original: Callable[..., Any], runner: Any, lora_ref: Any) -> Any:
    """Unload an adapter and leave its memory in torch's cache, for the one that is loaded next.

    SGLang empties the cache twice, to log the free memory.
    """
    return runner.lora_manager.unload_lora_adapter(lora_ref)
