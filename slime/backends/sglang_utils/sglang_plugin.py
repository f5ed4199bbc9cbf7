"""The core's hooks in SGLang's processes:

* every answer names its engine;
* pausing returns as soon as aborted requests have finished;
* scales and constants that weight pushes do not carry survive a sleep;
* decoding with Triton attends to the whole window;
* sampling kernels are built before an engine serves;
* encoders accept token ids with images, as they accept text; a flush also drops image features; and requests with
  precomputed image features are rejected.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Callable, Iterator
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
_UNPUSHED = "slime_unpushed"
"""Key in the state that SGLang keeps of a sleeping model."""
MAX_CONSTANT_BYTES = 2**20
"""Size of the largest attribute that is kept.  Larger ones (``w_kc`` and ``w_vc`` of latent attention) are made from
weights after every load."""
PAUSE_LOOK_S = 0.01
"""Seconds between checks whether aborted requests have ended; after one second, SGLang's own wait takes over."""
_BATCH_INFO = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo"
_TOKENIZER_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
_TOKENIZER = "transformers.PreTrainedTokenizerBase"
_SLEEP = "sglang.srt.managers.scheduler_components.weight_updater"
_MEMORY = "sglang.srt.utils.torch_memory_saver_adapter._TorchMemorySaverAdapterReal"
_TRITON_ATTENTION = "sglang.srt.layers.attention.triton_backend.TritonAttnBackend"
_RECEIVER = "sglang.srt.disaggregation.encode_receiver.MMReceiverBase"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"


def register() -> None:
    """Register the hooks of the core and of model families in this process; further calls have no effect."""
    register_hooks(
        (
            (f"{_SLEEP}._export_static_state", _keep_unpushed, "around"),
            (f"{_SLEEP}._import_static_state", _restore_unpushed, "around"),
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
    """Return True for a scale (KV cache, activations) that an engine computes itself and pushes do not carry."""
    return _OWN_SCALE.search(name) is not None


def _keep_unpushed(original: Callable[..., dict[str, Any]], model: torch.nn.Module) -> dict[str, Any]:
    """Save what pushes do not restore with the buffers while the memory of weights is released."""
    return {**original(model), _UNPUSHED: [(tensor, tensor.clone()) for tensor in _unpushed(model)]}


def _restore_unpushed(original: Callable[..., None], model: torch.nn.Module, state: dict[str, Any]) -> None:
    original(model, state)
    with torch.inference_mode():
        for tensor, saved in state[_UNPUSHED]:
            tensor.copy_(saved)


def _unpushed(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield the engine's own scales, by which latent attention divides keys, and constants that modules hold outside
    of parameters and buffers, by which Gemma 4's E forms scale the inputs of each layer.
    """
    yield from (parameter.data for name, parameter in model.named_parameters() if is_own_scale(name))
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, torch.Tensor) and value.nbytes <= MAX_CONSTANT_BYTES:
                yield value.detach()


def _wait_for_kernels(*_: Any) -> None:
    """Wait for queued kernels before their memory is unmapped.

    SGLang 0.5.15 copies the model's buffers and unmaps them without waiting: on a busy GPU the copy runs after the
    unmapping, which is an illegal memory access.
    """
    torch.cuda.synchronize()


def build_sampling_kernels(result: Any, scheduler: Any) -> None:
    """Build flashinfer's sampling kernels before the engine serves, if it will sample or verify drafts with them.

    SGLang's warm-up decodes greedily.  On a fresh machine the first sampled token would otherwise wait one to two
    minutes for the compiler, and a health check would consider the engine dead.
    """
    flags = scheduler.server_args
    uses_them = flags.sampling_backend == "flashinfer" or flags.speculative_algorithm is not None
    if uses_them and find_spec("flashinfer") is not None:
        from flashinfer.sampling import get_sampling_module

        get_sampling_module()


def whole_window(result: None, backend: Any, *args: Any, **options: Any) -> None:
    """Let a decoded token attend to all keys in its layer's window, including its own.

    SGLang's models express a window of w tokens as w - 1, the distance of the oldest key.  Triton's prefill masks by
    that distance; its decoding in 0.5.15 uses it as the number of keys, and so omits the oldest one.
    """
    if backend.sliding_window_size is not None and backend.sliding_window_size > 0:
        backend.sliding_window_size += 1


def _leave_a_token(result: None, info: Any, logits: torch.Tensor) -> None:
    """Allow every token if a grammar allows none: sampling from no tokens would crash the scheduler.

    The grammar then rejects the sampled token, and SGLang ends the request.
    """
    if info.vocab_mask is not None:
        logits.masked_fill_(logits.amax(-1, keepdim=True) == -torch.inf, 0.0)


async def _generate(original: Callable[..., Any], manager: Any, obj: Any, request: Any = None) -> AsyncIterator[Any]:
    engine = format_host_port(manager.server_args.host, manager.server_args.port)
    end = ""
    try:
        if request is None or not request.url.path.startswith("/health"):  # health checks need the server's own id
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
    except UNREADABLE as error:  # raised by SGLang on a malformed field; its server would answer 500
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
    """Reject a client's own chat template: a loop in it would block the server.

    Raises:
        ValueError: ``chat_template`` is given.
    """
    if chat_template is not None:
        raise ValueError(
            "chat_template_kwargs has chat_template; engines take no template from clients. Leave it out."
        )


def _check_text(tokenizer: Any, text: Any = None, *args: Any, **options: Any) -> None:
    check_text(text)


def _abort(original: Callable[..., None], manager: Any, rid: str = "", abort_all: bool = False) -> None:
    """Abort the requests to which a client gave this id, under the unique ids that the scheduler has for them."""
    known = [rid]
    if not abort_all and rid not in manager.rid_to_state:
        known = [one for one in manager.rid_to_state if rid and one.startswith(f"{rid}_")] or known
    for one in known:
        original(manager, one, abort_all)


async def _pause(original: Callable[..., Any], manager: Any, request: Any) -> None:
    """Pause within milliseconds after aborted requests have ended.

    SGLang 0.5.15 aborts, checks immediately, and then only every second, which delayed pushes during a rollout by a
    second.
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
    """Let a scheduler combine an encoder's features with a prompt of token ids, as with text.

    SGLang 0.5.15 looks for image placeholders only in the text, and crashes on a request without text.
    """
    for request in requests:
        if getattr(request, "need_wait_for_mm_inputs", None) and request.input_text is None:
            request.input_text = list(request.input_ids)
    return original(receiver, requests, *args, **options)


def _forget_images(is_flushed: bool, scheduler: Any, *args: Any, **options: Any) -> None:
    """Drop the image features that a scheduler caches by pixels, because the tower that computed them has changed.

    SGLang 0.5.15 flushes only its prompt cache.
    """
    from sglang.srt.managers import mm_utils

    if is_flushed and mm_utils.embedding_cache is not None:
        mm_utils.embedding_cache.clear()
