"""Plain torch forms of the operators of ``sgl_kernel`` that SGLang's gated delta nets and gated attention call on a
CPU (Qwen3-Next, Qwen3.5).  The rule itself is transformers' own.

A request's state is in a slot of two pools: of the convolution, the last inputs [slots, C, W - 1]; of the delta rule
[slots, H, v, k].

Shapes: T = tokens of all requests, one behind the other; C = channels of the convolution, W = its width; H = value
heads, k and v = widths of their keys and values; d = width of a head of attention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_FLA = "sglang.srt.layers.attention.fla"
HOOKED = {
    f"{_FLA}.layernorm_gated.RMSNorm.forward": "gated_norm",
    f"{_FLA}.fused_norm_gate.FusedRMSNormGated.forward": "gated_norm",
}
"""Function of SGLang -> the one here that is called in its place, with it in front."""


def convolve(
    inputs: Tensor, weight: Tensor, bias: Tensor | None, *, activation: str | None, conv_states: Tensor,
    has_initial_state: Tensor, cache_indices: Tensor, query_start_loc: Tensor, **unused: Any,
) -> Tensor:  # fmt: skip
    """Return the causal convolution, channel by channel, of new parts of requests [C, T]; update their states."""
    ends = query_start_loc.tolist()
    outputs = []
    for index, slot in enumerate(cache_indices.tolist()):
        new = inputs[:, ends[index] : ends[index + 1]]
        before = conv_states[slot] if has_initial_state[index] else torch.zeros_like(conv_states[slot])
        outputs.append(_convolved(torch.cat([before, new], dim=1)[None], weight, bias, activation)[0])
        conv_states[slot] = torch.cat([before, new], dim=1)[:, -before.size(1) :]
    return torch.cat(outputs, dim=1)


def convolve_next(
    inputs: Tensor, conv_states: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, *,
    conv_state_indices: Tensor,
) -> Tensor:  # fmt: skip
    """Return the same of one more token of each request, [requests, C]."""
    slots = conv_state_indices.long()
    padded = torch.cat([conv_states[slots], inputs[..., None]], dim=-1)
    conv_states[slots] = padded[..., 1:]
    return _convolved(padded, weight, bias, activation)[..., 0]


def _convolved(padded: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    output = F.conv1d(padded, weight[:, None], bias, groups=len(weight))
    return F.silu(output) if activation in ("silu", "swish") else output


def gates(a_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logs of the decays and the sizes of the updates, fp32 [1, T, H]."""
    decay = -a_log.float().exp() * F.softplus(a.float() + dt_bias.float())
    return decay[None], b.float().sigmoid()[None]


def delta_rule(
    *, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor, initial_state_indices: Tensor,
    cu_seqlens: Tensor, **unused: Any,
) -> tuple[Tensor, None, None]:  # fmt: skip
    """Return the outputs [1, T, H, v] for new parts of requests, and nothing of the states, which are updated."""
    ends, output = cu_seqlens.tolist(), torch.empty_like(v)
    for index, slot in enumerate(initial_state_indices.tolist()):
        part = slice(ends[index], ends[index + 1])
        output[:, part] = _ruled(
            initial_state, torch.tensor([slot]), *(x[:, part] for x in (q, k, v, g, beta)), is_one_token=False
        )
    return output, None, None


def delta_rule_next(
    *, A_log: Tensor, dt_bias: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor,  # noqa: N803
    initial_state_source: Tensor, initial_state_indices: Tensor, disable_state_update: bool = False, **unused: Any,
) -> Tensor:  # fmt: skip
    """Return the outputs [1, requests, H, v] for one more token of each request, and update the states.

    Raises:
        NotImplementedError: the tokens are drafts, to be verified.
    """
    if disable_state_update:
        raise NotImplementedError("speculative decoding of delta nets is not supported on a CPU")
    g, beta = gates(A_log, a, b, dt_bias)
    single = (x.transpose(0, 1) for x in (q, k, v, g, beta))
    slots = initial_state_indices.long()
    return _ruled(initial_state_source, slots, *single, is_one_token=True).transpose(0, 1)


def _ruled(states: Tensor, slots: Tensor, *inputs: Tensor, is_one_token: bool) -> Tensor:
    """Return the outputs [requests, tokens, H, v] for q, k, v, g and beta; the states of ``slots`` are updated."""
    from transformers.models.qwen3_next import modeling_qwen3_next as plain

    q, k, v, g, beta = inputs
    repeats = v.size(2) // q.size(2)
    in_chunks, in_steps = plain.torch_chunk_gated_delta_rule, plain.torch_recurrent_gated_delta_rule
    rule: Callable[..., Any] = in_steps if is_one_token else in_chunks
    output, state = rule(
        *(x.repeat_interleave(repeats, dim=2) for x in (q, k)), v, g=g, beta=beta,
        initial_state=states[slots].mT, output_final_state=True, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    states[slots] = state.mT.to(states.dtype)
    return output


def norm_queries_and_keys(
    queries: Tensor, keys: Tensor, query_weight: Tensor, key_weight: Tensor, epsilon: float, head_dim: int
) -> tuple[Tensor, Tensor]:
    """Return both with each head's RMS norm, whose weight counts from one, [rows, d]."""
    return tuple(  # type: ignore[return-value]
        F.rms_norm(x.reshape(-1, head_dim).float(), (head_dim,), 1.0 + weight.float(), epsilon).to(x.dtype)
        for x, weight in ((queries, query_weight), (keys, key_weight))
    )


def norm_and_part_gate(
    queries_and_gate: Tensor, keys: Tensor, query_weight: Tensor, key_weight: Tensor, epsilon: float, head_dim: int,
    num_heads: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the same of [T, heads * 2 d], where each head's gate is behind its query; and the gates [T, heads, d]."""
    queries, gate = queries_and_gate.unflatten(-1, (num_heads, 2 * head_dim)).chunk(2, dim=-1)
    normed = norm_queries_and_keys(queries, keys, query_weight, key_weight, epsilon, head_dim)
    return *normed, gate.contiguous()


def multiply_by_gate(outputs: Tensor, gate: Tensor, inplace: bool = False) -> Tensor:
    """Return ``outputs * sigmoid(gate)``."""
    return outputs * gate.reshape(outputs.shape).sigmoid()


def gated_norm(original: Callable[..., Any], layer: Any, inputs: Tensor, gate: Tensor, **options: Any) -> Tensor:
    """Return the RMS norm of the outputs of a delta net, times its gate; in the place of Triton's."""
    activate = torch.sigmoid if layer.activation == "sigmoid" else F.silu
    normed = F.rms_norm(inputs.float(), inputs.shape[-1:], layer.weight.float(), layer.eps)
    return (normed * activate(gate.float())).to(inputs.dtype)


MODULE = {
    "causal_conv1d_fn_cpu": convolve,
    "causal_conv1d_update_cpu": convolve_next,
    "chunk_gated_delta_rule_cpu": delta_rule,
}
"""Functions of ``sgl_kernel.mamba``."""
OPERATORS = {
    "fused_gdn_gating_cpu": gates,
    "fused_sigmoid_gating_delta_rule_update_cpu": delta_rule_next,
    "fused_sigmoid_mul_cpu": multiply_by_gate,
    "fused_qk_gemma_rmsnorm_cpu": norm_queries_and_keys,
    "fused_qk_gemma_rmsnorm_with_gate_cpu": norm_and_part_gate,
}
"""``torch.ops.sgl_kernel``; SGLang's models look some of them up while they are imported."""
