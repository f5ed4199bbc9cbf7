"""Plain forms of what SGLang has as Triton kernels alone: latent attention, adapters of it and of experts, grammars.

SGLang's own backend of adapters for a CPU (``--lora-backend torch_native``) serves single linear layers only.

Shapes: T = tokens, H = heads, E = experts, r = rank of the slots, h = hidden size, f = width of an expert, k = experts
of a token; D = width of the latent, q and v = widths of a head's key without its rotary part, and of its value.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

_LATENT = "sglang.srt.lora.deepseek_mla_correction"
HOOKED = {
    "sglang.srt.models.deepseek_common.attention_backend_handler.AttentionBackendRegistry.get_handler": "latent_way",
    "sglang.srt.layers.rotary_embedding.factory.get_rope_cpu": "positions",
    "sglang.srt.lora.layers.FusedMoEWithLoRA.forward": "experts_forward",
    f"{_LATENT}.apply_q_correction": "add_to_queries",
    f"{_LATENT}.apply_v_correction": "add_to_values",
    "sglang.srt.constrained.xgrammar_backend.XGrammarGrammar.apply_vocab_mask": "mask_logits",
}
"""Function of SGLang -> the one here that is called in its place, with it in front."""


def mask_logits(original: Callable[..., None], grammar: Any, logits: Tensor, vocab_mask: Tensor) -> None:
    """Forbid the tokens that a grammar does not take next, with xgrammar's own loop."""
    import xgrammar

    xgrammar.apply_token_bitmask_inplace(logits, vocab_mask)


def latent_way(original: Callable[..., Any], registry: type, backend: str) -> Callable[..., Any]:
    """Return what chooses between attention over latents and over keys; for torch's backend always the first.

    Its cache holds latents, which the other way, SGLang's default for a prefill, would take for keys.
    """
    if backend != "torch_native":
        return original(registry, backend)
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    return lambda attention, batch: AttnForwardMethod.MLA


def positions(original: Callable[..., Any], *sizes: Any) -> Any:
    """Return the rotary positions of latent attention: SGLang knows but DeepSeek's stretched ones on a CPU.

    Args:
        sizes: arguments of ``get_rope``, the sixth of them what stretches, and the device.
    """
    from sglang.srt.layers.rotary_embedding.factory import get_rope

    return original(*sizes) if sizes[5] else get_rope(*sizes[:-1])


def experts_forward(
    original: Callable[..., Any], layer: Any, hidden_states: Tensor, topk_output: Any, **options: Any
) -> Tensor:
    """Return the experts' outputs [T, h], each token's with the adapter of its request.

    Raises:
        NotImplementedError: SGLang has packed the weights for AMX.
    """
    from sglang.srt.layers.moe.fused_moe_native import moe_forward_native
    from sglang.srt.utils import use_intel_amx_backend

    if use_intel_amx_backend(layer.base_layer):
        raise NotImplementedError("no adapters of experts whose weights are packed for AMX; use --lora-push merged")
    output = torch.empty_like(hidden_states)
    slot_of_token = layer.lora_backend.batch_info.moe_lora_info.token_lora_mapping
    for slot in slot_of_token.unique().tolist():
        rows = slot_of_token == slot
        chosen = topk_output._replace(topk_weights=topk_output.topk_weights[rows], topk_ids=topk_output.topk_ids[rows])
        output[rows] = moe_forward_native(
            _with_adapter(layer, slot), hidden_states[rows], chosen, layer.moe_runner_config
        )
    return output


def _with_adapter(layer: Any, slot: int) -> Any:
    """Return the experts with the adapter of a slot added to their weights; its Bs are scaled already."""
    base = layer.base_layer
    if not layer.lora_backend.batch_info.lora_ranks[slot]:
        return base
    # [E or 1, 2 r, h], [E, 2 f, r]; [E, r, f], [E or 1, h, r]
    up_a, up_b = layer.gate_up_lora_a_weights[slot], layer.gate_up_lora_b_weights[slot]
    down_a, down_b = layer.down_lora_a_weights[slot], layer.down_lora_b_weights[slot]
    halves = zip(up_b.chunk(2, dim=1), up_a.chunk(2, dim=1), strict=True)
    added = torch.cat([b @ a for b, a in halves], dim=1)
    biases = {name: getattr(base, name, None) for name in ("w13_weight_bias", "w2_weight_bias")}
    return Namespace(
        num_experts=base.num_experts,
        w13_weight=base.w13_weight + added,
        w2_weight=base.w2_weight + down_b @ down_a,
        **biases,
    )


def add_to_queries(original: Callable[..., Any], attention: Any, queries: Tensor, absorbed: Tensor) -> Tensor:
    """Return ``absorbed`` [T, H, D], the queries times the keys' part of ``kv_b_proj``, with its adapter's share.

    Args:
        queries: [T, H, q].
        absorbed: [T, H, D].
    """
    absorbed = absorbed.clone()
    for rows, a, b, scale in _segments(attention):
        part = b.view(attention.num_local_heads, -1, b.size(-1))[:, : attention.qk_nope_head_dim]
        absorbed[rows] += scale * torch.einsum("thq,hqr,rd->thd", queries[rows], part, a)
    return absorbed


def add_to_values(original: Callable[..., Any], attention: Any, latents: Tensor, values: Tensor) -> Tensor:
    """Return ``values`` [T, H v], the attended latents times the values' part, with the adapter's share.

    Args:
        latents: [T, H, D].
        values: [T, H v].
    """
    values = values.clone()
    for rows, a, b, scale in _segments(attention):
        part = b.view(attention.num_local_heads, -1, b.size(-1))[:, attention.qk_nope_head_dim :]
        values[rows] += scale * torch.einsum("thd,rd,hvr->thv", latents[rows], a, part).flatten(1)
    return values


def _segments(attention: Any) -> Iterator[tuple[slice, Tensor, Tensor, float]]:
    """Yield the tokens of each run of requests with one adapter; its A [r, D], its B [H (q + v), r], its scale."""
    module = attention.kv_b_proj
    info = module.lora_backend.batch_info
    ends = info.seg_indptr_cpu.tolist()
    for index, slot in enumerate(info.weight_indices_cpu.tolist()):
        if rank := int(info.lora_ranks_cpu[slot]):
            scale = float(info.scalings_cpu[slot])
            yield slice(*ends[index : index + 2]), module.A_buffer[slot, :rank], module.B_buffer[slot, :, :rank], scale
