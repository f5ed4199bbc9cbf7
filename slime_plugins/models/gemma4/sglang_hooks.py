"""Hooks for Gemma 4 in SGLang: keep the router's scale current after weight pushes; and, on a CPU, run the model.

On a CPU, SGLang 0.5.15 refuses torch-native attention; that attention looks up sliding-window keys in the wrong pool;
SGLang pads an expert width that dense models do not have; and it has no CPU kernel for capped logits or GELU experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_BACKEND = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
_EXPERTS = "sglang.srt.layers.quantization.unquant.UnquantizedFusedMoEMethod"


def adjust(original: Callable[..., None], server_args: Any) -> None:
    """Make SGLang's check of Gemma 4's attention backend accept ``torch_native``; other backends are unaffected."""
    backend = server_args.attention_backend
    config = server_args.get_model_config().hf_config
    if not any(name.startswith("Gemma4") for name in config.architectures or ()):
        original(server_args)
        return
    server_args.attention_backend = "triton" if backend == "torch_native" else backend
    try:
        original(server_args)
    finally:
        server_args.attention_backend = backend


def in_window_pool(original: Callable[..., Any], backend: Any, *args: Any, **options: Any) -> Any:
    """Look up the keys of sliding-window layers in their own pool, by translating locations in the full pool."""
    if not backend.use_sliding_window_kv_pool or options.get("sliding_window_size") is None:
        return original(backend, *args, **options)
    query, output, keys, values, places, requests, *rest = args
    own = backend.token_to_kv_pool.translate_loc_from_full_to_swa(places[requests])
    return original(
        backend, query, output, keys, values, own, torch.arange(len(requests), device=own.device), *rest, **options
    )


def pad_what_is_there(original: Callable[..., Any], model_config: Any, name: str, size: int) -> Any:
    """Pad a width to full blocks of the CPU kernels, unless the key is null in config.json."""
    text = getattr(getattr(model_config, "hf_config", None), "text_config", None)
    has_number = text is None or getattr(text, name, size) is not None
    return original(model_config, name, size) if has_number else model_config


def soft_cap(original: Callable[..., Any], logits: torch.Tensor, cap: float) -> Any:
    """Cap logits in place; in plain torch on a CPU, which has no kernel for it."""
    return original(logits, cap) if logits.is_cuda else logits.div_(cap).tanh_().mul_(cap)


def with_present_factor(original: Callable[..., torch.Tensor], router: Any, x: torch.Tensor) -> torch.Tensor:
    """Fold the router's scale into its norm in every pass: SGLang does so only in the first, before later pushes.

    On a CPU the norm omits the scale, so it is applied here.
    """
    router.fuse_scale()
    logits: torch.Tensor = original(router, x) if x.is_cuda else router.proj(router.norm(x) * router.norm.weight)[0]
    return logits


def gated_by_gelu(original: Callable[..., Any], method: Any, layer: Any, dispatch_output: Any) -> Any:
    """Run experts with tanh-approximated GELU on a CPU in plain torch; SGLang supports only SiLU there."""
    from sglang.srt.layers.moe.fused_moe_native import moe_forward_native
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput
    from sglang.srt.utils import use_intel_amx_backend

    config = method.moe_runner_config
    if config.activation != "gelu" or use_intel_amx_backend(layer):
        return original(method, layer, dispatch_output)
    output = moe_forward_native(layer, dispatch_output.hidden_states, dispatch_output.topk_output, config)
    return StandardCombineInput(hidden_states=output)


HOOKS = (
    ("sglang.srt.models.gemma4_causal.Gemma4Router.forward", with_present_factor, "around"),
    ("sglang.srt.server_args.ServerArgs._handle_model_specific_adjustments", adjust, "around"),
    (f"{_EXPERTS}.forward_cpu", gated_by_gelu, "around"),
    (f"{_EXPERTS}.forward_native", gated_by_gelu, "around"),  # the same function, called on a CPU without AMX
    ("sglang.srt.configs.update_config.update_intermediate_size", pad_what_is_there, "around"),
    ("sglang.srt.layers.logits_processor.fused_softcap", soft_cap, "around"),
    (f"{_BACKEND}._run_sdpa_forward_extend", in_window_pool, "around"),
    (f"{_BACKEND}._run_sdpa_forward_decode", in_window_pool, "around"),
)
