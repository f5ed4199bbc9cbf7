"""Gemma 4 on a CPU: torch's attention, which SGLang 0.5.15 refuses, and which looks for keys of windows elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_BACKEND = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"


def allow_torch_native(original: Callable[..., None], server_args: Any) -> None:
    """Let the check of a Gemma 4's attention backend pass ``torch_native``; whoever asks for another gets it."""
    backend = server_args.attention_backend
    if backend != "torch_native" or not _is_gemma4(server_args.get_model_config().hf_config):
        original(server_args)
        return
    server_args.attention_backend = "triton"
    try:
        original(server_args)
    finally:
        server_args.attention_backend = backend


def _is_gemma4(config: Any) -> bool:
    return any(name.startswith("Gemma4") for name in config.architectures or ())


def in_window_pool(original: Callable[..., Any], backend: Any, *args: Any, **options: Any) -> Any:
    """Look up the keys of a layer with a window where they are, in their own pool: the places come from the other."""
    if not backend.use_sliding_window_kv_pool or options.get("sliding_window_size") is None:
        return original(backend, *args, **options)
    query, output, keys, values, places, requests, *rest = args
    own = backend.token_to_kv_pool.translate_loc_from_full_to_swa(places[requests])
    return original(
        backend, query, output, keys, values, own, torch.arange(len(requests), device=own.device), *rest, **options
    )


HOOKS = (
    ("sglang.srt.server_args.ServerArgs._handle_model_specific_adjustments", allow_torch_native, "around"),
    (f"{_BACKEND}._run_sdpa_forward_extend", in_window_pool, "around"),
    (f"{_BACKEND}._run_sdpa_forward_decode", in_window_pool, "around"),
)
