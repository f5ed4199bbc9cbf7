"""The core's hooks in SGLang's processes.

Every answer names its engine.
A pause ends as soon as aborted requests have.
Scales that no push brings outlast a sleep.
Decoding with Triton sees a whole window.
Sampling kernels are built before an engine serves.
Ids with images go to an encoder as text does, a flush forgets features of images, and a request that brings some is
refused.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from importlib.util import find_spec
from typing import Any

import torch

from slime.backends.sglang_utils import cpu_shim
from slime.backends.sglang_utils.cpu_shim import TESTED_SGLANG, delta_nets, native_layers, weights_checker
from slime.backends.sglang_utils.hooks import family_hooks, register_hooks
from slime.backends.sglang_utils.request_check import (
    LOADING,
    UNREADABLE,
    check_request,
    check_sequence,
    check_text,
    give_own_ids,
)
from slime.utils.net import format_host_port

logger = logging.getLogger(__name__)

_OWN_SCALE = re.compile(r"(^|[._])(k_scale|v_scale|input_scale|input_scale_inv)$")
_OWN_SCALES = "slime_own_scales"
"""Key in the state that SGLang keeps of a model that sleeps."""
PAUSE_LOOK_S = 0.01
"""Between two looks whether aborted requests have ended, for a second; then SGLang's own wait begins."""
_BATCH_INFO = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo"
_TOKENIZER_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
_TOKENIZER = "transformers.PreTrainedTokenizerBase"
_SLEEP = "sglang.srt.managers.scheduler_components.weight_updater"
_MEMORY = "sglang.srt.utils.torch_memory_saver_adapter._TorchMemorySaverAdapterReal"
_TRITON_ATTENTION = "sglang.srt.layers.attention.triton_backend.TritonAttnBackend"
_RECEIVER = "sglang.srt.disaggregation.encode_receiver.MMReceiverBase"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"


def register() -> None:
    """Register the hooks of the core and of model families in this process; again: no effect."""
    register_hooks(
        (
            (f"{_SLEEP}._export_static_state", _keep_own_scales, "around"),
            (f"{_SLEEP}._import_static_state", _restore_own_scales, "around"),
            (f"{_MEMORY}.pause", _wait_for_kernels, "before"),
            (f"{_BATCH_INFO}.apply_logits_bias", _leave_a_token, "after"),
            (f"{_TOKENIZER_MANAGER}.generate_request", _generate, "around"),
            (f"{_TOKENIZER_MANAGER}.abort_request", _abort, "around"),
            (f"{_TOKENIZER_MANAGER}._create_tokenized_object", _check_sequence, "after"),
            (f"{_TOKENIZER}.apply_chat_template", _check_template, "before"),
            (f"{_TOKENIZER}.encode", _check_text, "before"),
            (f"{_TOKENIZER}.__call__", _check_text, "before"),
            (f"{_TOKENIZER_MANAGER}.pause_generation", _pause, "around"),
            (f"{_RECEIVER}._process_waiting_requests", _receive_images, "around"),
            (f"{_SCHEDULER}.flush_cache", _forget_images, "after"),
        )
    )
    register_hooks(family_hooks())
    if cpu_shim.is_needed():
        for module in (native_layers, delta_nets, weights_checker):
            register_hooks((target, getattr(module, name), "around") for target, name in module.HOOKED.items())
    else:
        register_hooks([(f"{_SCHEDULER}.init_model_worker", build_sampling_kernels, "after")])
        register_hooks([(f"{_TRITON_ATTENTION}.__init__", whole_window, "after")], only_version=TESTED_SGLANG)


def is_own_scale(name: str) -> bool:
    """Return True for a scale, of the KV cache or of activations, that an engine makes for itself.

    No push brings it.
    """
    return _OWN_SCALE.search(name) is not None


def _keep_own_scales(original: Callable[..., dict[str, Any]], model: torch.nn.Module) -> dict[str, Any]:
    """Keep the engine's own scales beside the buffers while the memory of weights is released.

    No push brings them back, and latent attention divides keys by ``k_scale``.
    """
    scales = {name: p.detach().clone() for name, p in model.named_parameters() if is_own_scale(name)}
    return {**original(model), _OWN_SCALES: scales}


def _wait_for_kernels(*_: Any) -> None:
    """Wait for queued kernels before memory is unmapped under them.

    SGLang 0.5.15 copies the model's buffers and unmaps them in the same breath: on a busy GPU the copy comes second,
    which is an illegal memory access.
    """
    torch.cuda.synchronize()


def build_sampling_kernels(result: Any, scheduler: Any) -> None:
    """Build flashinfer's sampling kernels before the engine serves, where it will sample or verify drafts with them.

    SGLang's own warm-up decodes greedily.  The first sampled token of a fresh machine would wait for the compiler, one
    to two minutes, and a health check would take the engine for dead.
    """
    flags = scheduler.server_args
    uses_them = flags.sampling_backend == "flashinfer" or flags.speculative_algorithm is not None
    if uses_them and find_spec("flashinfer") is not None:
        from flashinfer.sampling import get_sampling_module

        get_sampling_module()


def whole_window(result: None, backend: Any, *args: Any, **options: Any) -> None:
    """Let a decoded token see as many keys as its layer's window has, itself among them.

    SGLang's models give a window of w tokens as w - 1, the distance of the oldest key.  Triton's prefill masks by that
    distance; its decoding of 0.5.15 takes it for the number of keys, and leaves the oldest out.
    """
    if backend.sliding_window_size is not None and backend.sliding_window_size > 0:
        backend.sliding_window_size += 1


def _restore_own_scales(original: Callable[..., None], model: torch.nn.Module, state: dict[str, Any]) -> None:
    original(model, state)
    with torch.inference_mode():
        for name, scale in state[_OWN_SCALES].items():
            model.get_parameter(name).copy_(scale)


def _leave_a_token(result: None, info: Any, logits: torch.Tensor) -> None:
    """Allow every token where a grammar allows none: there is nothing to draw from, which ends the scheduler.

    The grammar takes none of them, and SGLang ends the request.
    """
    if info.vocab_mask is not None:
        logits.masked_fill_(logits.amax(-1, keepdim=True) == -torch.inf, 0.0)


async def _generate(original: Callable[..., Any], manager: Any, obj: Any, request: Any = None) -> AsyncIterator[Any]:
    engine = format_host_port(manager.server_args.host, manager.server_args.port)
    end = ""
    try:
        if request is None or not request.url.path.startswith("/health"):  # the server's own, whose id it needs
            check_request(obj, labels=_labels(manager), scores_items=manager.server_args.enable_mis)
            end = give_own_ids(obj)
        async with aclosing(original(manager, obj, request)) as answers:
            async for answer in answers:
                for one in answer if isinstance(answer, list) else [answer]:
                    if isinstance(one, dict) and isinstance(one.get("meta_info"), dict):
                        _complete(one["meta_info"], engine, end)
                yield answer
    except RuntimeError as error:
        if LOADING not in str(error):
            raise
        raise ValueError(f"The request cannot be served: {error}") from error
    except UNREADABLE as error:  # of SGLang, over a field of another shape; its server would answer 500
        logger.info("A request was refused.", exc_info=True)
        raise ValueError(f"The request is not what SGLang takes: {type(error).__name__}: {error}") from error


def _complete(meta: dict[str, Any], engine: str, end: str) -> None:
    meta["engine"] = engine
    if end:
        meta["id"] = meta["id"].replace(end, "")


def _labels(manager: Any) -> frozenset[str]:
    return frozenset(manager.server_args.tokenizer_metrics_allowed_custom_labels or ())


def _check_sequence(sequence: Any, manager: Any, *args: Any, **options: Any) -> None:
    check_sequence(sequence, manager.model_config.vocab_size)


def _check_template(tokenizer: Any, *args: Any, chat_template: Any = None, **options: Any) -> None:
    """Refuse a template of a client's own: a loop in it holds up the server.

    Raises:
        ValueError: as said.
    """
    if chat_template is not None:
        raise ValueError(
            "chat_template_kwargs has chat_template; engines take no template from clients. Leave it out."
        )


def _check_text(tokenizer: Any, text: Any = None, *args: Any, **options: Any) -> None:
    check_text(text)


def _abort(original: Callable[..., None], manager: Any, rid: str = "", abort_all: bool = False) -> None:
    """Abort the requests to which a client gave this id, under the ids that the scheduler knows them by."""
    known = [rid]
    if not abort_all and rid not in manager.rid_to_state:
        known = [one for one in manager.rid_to_state if rid and one.startswith(f"{rid}_")] or known
    for one in known:
        original(manager, one, abort_all)


async def _pause(original: Callable[..., Any], manager: Any, request: Any) -> None:
    """Pause once aborted requests have ended, within milliseconds.

    SGLang 0.5.15 aborts, looks at once, and then only every second: a push during a rollout took one more.
    """
    if request.mode == "abort":
        async with manager.is_pause_cond:
            manager.is_pause = True  # holds new requests, as SGLang's own pause does
        manager.abort_request(abort_all=True)
        for _ in range(round(1 / PAUSE_LOOK_S)):
            if not await manager.model_update_lock.is_locked():
                break
            await asyncio.sleep(PAUSE_LOOK_S)
    await original(manager, request)


def _receive_images(original: Callable[..., Any], receiver: Any, requests: Any, *args: Any, **options: Any) -> Any:
    """Let a scheduler join an encoder's features with a prompt of ids, as it does with text.

    SGLang 0.5.15 looks for the places of images in the text alone, and ends when a request has none.
    """
    for request in requests:
        if getattr(request, "need_wait_for_mm_inputs", None) and request.input_text is None:
            request.input_text = list(request.input_ids)
    return original(receiver, requests, *args, **options)


def _forget_images(is_flushed: bool, scheduler: Any, *args: Any, **options: Any) -> None:
    """Drop the features of images that a scheduler keeps by their pixels: the tower that made them has changed.

    SGLang 0.5.15 flushes only what it keeps of prompts.
    """
    from sglang.srt.managers import mm_utils

    if is_flushed and mm_utils.embedding_cache is not None:
        mm_utils.embedding_cache.clear()
