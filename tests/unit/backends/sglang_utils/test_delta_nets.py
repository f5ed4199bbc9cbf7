"""CPU replacements of SGLang's delta-net kernels: split and batched requests against plain loops."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from slime.backends.sglang_utils import cpu_shim
from slime.backends.sglang_utils.cpu_shim import delta_nets

LENGTHS = (9, 70)
"""Lengths of two requests; the rule works in chunks of 64."""


def parts_of(lengths):
    """First parts, second parts, and one more token of each request, as (starts, stops)."""
    cuts = [(0, 4, length - 1, length) for length in lengths]
    return [[(c[k], c[k + 1]) for c in cuts] for k in range(3)]


def offsets(ranges):
    return torch.tensor([0, *(stop - start for start, stop in ranges)]).cumsum(0).int()


def test_a_convolution_in_parts_is_that_of_the_whole():
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(6, length, generator=generator) for length in LENGTHS]
    weight, bias = torch.randn(6, 4, generator=generator), torch.randn(6, generator=generator)
    whole = [F.silu(F.conv1d(F.pad(x, (3, 0))[None], weight[:, None], bias, groups=6)[0]) for x in inputs]
    states, slots = torch.full((5, 6, 3), math.nan), torch.tensor([3, 1])
    *filled, last = parts_of(LENGTHS)
    for number, ranges in enumerate(filled):
        new = torch.cat([x[:, slice(*part)] for x, part in zip(inputs, ranges, strict=True)], dim=1)
        output = delta_nets.convolve(
            new, weight, bias, activation="silu", conv_states=states, cache_indices=slots,
            has_initial_state=torch.tensor([number > 0] * 2), query_start_loc=offsets(ranges), seq_lens_cpu=None,
        )  # fmt: skip
        expected = torch.cat([x[:, slice(*part)] for x, part in zip(whole, ranges, strict=True)], dim=1)
        torch.testing.assert_close(output, expected)
    new = torch.stack([x[:, start] for x, (start, _) in zip(inputs, last, strict=True)])
    output = delta_nets.convolve_next(new, states, weight, bias, "silu", conv_state_indices=slots.int())
    torch.testing.assert_close(output, torch.stack([x[:, -1] for x in whole]))
    assert states[[0, 2, 4]].isnan().all()


def plain_rule(q, k, v, g, beta):
    """S = exp(g) S; S += k (beta (v - S k)); o = S q / sqrt(dim), one token after the other."""
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    state, outputs = torch.zeros(v.size(1), v.size(2), k.size(2)), []
    for t in range(len(v)):
        state = state * g[t].exp()[:, None, None]
        wrong = v[t] - (state * k[t][:, None]).sum(-1)
        state = state + beta[t][:, None, None] * wrong[..., None] * k[t][:, None]
        outputs.append((state * q[t][:, None]).sum(-1) / k.size(2) ** 0.5)
    return torch.stack(outputs), state


def test_a_delta_rule_in_parts_is_that_of_the_whole():
    generator = torch.Generator().manual_seed(1)
    key_heads, heads, width, value_width = 2, 4, 8, 6

    def random(*sizes):
        return torch.randn(*sizes, generator=generator)

    a_log, dt_bias = random(heads), random(heads)
    requests = []
    for length in LENGTHS:
        q, k = random(length, key_heads, width), random(length, key_heads, width)
        requests.append((q, k, random(length, heads, value_width), random(length, heads), random(length, heads)))
    expected = []
    for q, k, v, a, b in requests:
        g, beta = -a_log.exp() * F.softplus(a + dt_bias), b.sigmoid()
        expected.append(plain_rule(q.repeat_interleave(2, 1), k.repeat_interleave(2, 1), v, g, beta))
    states, slots = torch.zeros(5, heads, value_width, width), torch.tensor([4, 2], dtype=torch.int32)
    *filled, last = parts_of(LENGTHS)

    def joined(ranges, column):
        return torch.cat([r[column][slice(*part)] for r, part in zip(requests, ranges, strict=True)])

    for ranges in [*filled, last]:
        q, k, v, a, b = (joined(ranges, column) for column in range(5))
        shared = {"q": q[None], "k": k[None], "v": v[None]}
        if ranges is last:
            output = delta_nets.delta_rule_next(
                A_log=a_log, dt_bias=dt_bias, a=a, b=b, initial_state_source=states, initial_state_indices=slots,
                cu_seqlens=offsets(ranges), **shared,
            )  # fmt: skip
        else:
            g, beta = delta_nets.gates(a_log, a, b, dt_bias)
            output, _, _ = delta_nets.delta_rule(
                g=g, beta=beta, initial_state=states, initial_state_indices=slots, cu_seqlens=offsets(ranges), **shared
            )
        whole = torch.cat([outputs[slice(*part)] for (outputs, _), part in zip(expected, ranges, strict=True)])
        torch.testing.assert_close(output[0], whole, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        states[slots.long()], torch.stack([state for _, state in expected]), rtol=1e-5, atol=1e-5
    )
    assert not states[[0, 1, 3]].any()


def test_queries_are_normed_and_parted_from_their_gates():
    generator = torch.Generator().manual_seed(2)
    both, keys = torch.randn(3, 2 * 2 * 4, generator=generator), torch.randn(3, 4, generator=generator)
    q, k, gate = delta_nets.norm_and_part_gate(both, keys, torch.full((4,), 0.5), torch.zeros(4), 0.0, 4, 2)
    first = both[0, :4]
    torch.testing.assert_close(q[0], 1.5 * first / first.square().mean().sqrt())
    torch.testing.assert_close(k[1], keys[1] / keys[1].square().mean().sqrt())
    assert torch.equal(gate[0], torch.stack([both[0, 4:8], both[0, 12:]]))
    assert torch.equal(delta_nets.multiply_by_gate(both[:, :8], gate), both[:, :8] * gate.flatten(1).sigmoid())
    layer = SimpleNamespace(weight=torch.full((4,), 2.0), eps=0.0, activation="sigmoid")
    expected = 2 * k[1] * keys[2].sigmoid()
    torch.testing.assert_close(delta_nets.gated_norm(None, layer, keys[1], keys[2]), expected)


@pytest.mark.skipif(torch.cuda.is_available(), reason="with CUDA SGLang has kernels of its own")
def test_sglang_finds_them_where_it_looks():
    cpu_shim.install()
    from sglang.srt.layers.attention.linear import gdn_backend
    from sglang.srt.layers.attention.linear.kernels import gdn_triton
    from sglang.srt.models import qwen3_5

    assert gdn_backend.causal_conv1d_fn is delta_nets.convolve
    assert gdn_backend.causal_conv1d_update is delta_nets.convolve_next
    assert gdn_backend.fused_gdn_gating is delta_nets.gates
    assert gdn_triton.chunk_gated_delta_rule is delta_nets.delta_rule
    assert gdn_triton.fused_sigmoid_gating_delta_rule_update is delta_nets.delta_rule_next
    assert qwen3_5.fused_qk_gemma_rmsnorm_with_gate is delta_nets.norm_and_part_gate
