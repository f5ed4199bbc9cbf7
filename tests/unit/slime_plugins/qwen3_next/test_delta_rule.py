"""The gated delta rule: values by hand, chunks against single tokens, packed against separate, gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from slime_plugins.models.qwen3_next import delta_rule
from slime_plugins.models.qwen3_next.delta_rule import chunked_delta_rule, gated_delta_rule, unit
from slime_plugins.models.qwen3_next.packed_rows import PackedRows


def token_by_token(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, strength: Tensor, offsets: list[int]
) -> Tensor:
    """The definition: one state per head, reset at the start of each sequence."""
    query, key = unit(query) / math.sqrt(query.size(-1)), unit(key)
    outputs = []
    for begin, end in zip(offsets, offsets[1:], strict=False):
        state = value.new_zeros(*value.shape[1:3], key.size(-1), value.size(-1))
        for t in range(begin, end):
            state = state * log_decay[t].exp()[..., None, None]
            held = torch.einsum("hrkv,hk->hrv", state, key[t])
            change = strength[t][..., None] * (value[t] - held)
            state = state + torch.einsum("hk,hrv->hrkv", key[t], change)
            outputs.append(torch.einsum("hrkv,hk->hrv", state, query[t]))
    return torch.stack(outputs)


def inputs(
    num_tokens: int, *, heads: int = 2, ratio: int = 3, dk: int = 5, dv: int = 7, seed: int = 0
) -> list[Tensor]:
    """fp64 inputs; decays from nearly none to nearly everything."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(num_tokens, *shape, generator=generator, dtype=torch.float64)

    log_decay = -(2 * normal(heads, ratio)).exp()
    return [normal(heads, dk), normal(heads, dk), normal(heads, ratio, dv), log_decay, normal(heads, ratio).sigmoid()]


def rows_of(offsets: list[int], chunk: int = 4) -> PackedRows:
    return PackedRows.from_offsets(offsets, conv_width=3, chunk=chunk)


def test_two_tokens_by_hand():
    # unit keys (1, 0) and (0.6, 0.8); the state decays by half and is corrected by a quarter
    key = torch.tensor([[[2.0, 0.0]], [[3.0, 4.0]]], dtype=torch.float64)
    query = torch.tensor([[[5.0, 0.0]], [[0.0, 7.0]]], dtype=torch.float64)
    value = torch.tensor([8.0, 1.0], dtype=torch.float64).view(2, 1, 1, 1)
    log_decay = torch.tensor([0.5, 0.5], dtype=torch.float64).log().view(2, 1, 1)
    strength = torch.tensor([0.5, 0.25], dtype=torch.float64).view(2, 1, 1)
    out = chunked_delta_rule(query, key, value, log_decay, strength, rows_of([0, 2]))
    first = 0.5 * 8.0  # written under (1, 0), read with (1, 0)
    change = 0.25 * (1.0 - 0.6 * first / 2)
    expected = torch.tensor([first, 0.8 * change], dtype=torch.float64) / math.sqrt(2)
    torch.testing.assert_close(
        out.flatten(), expected, atol=1e-6, rtol=0
    )  # normalized vectors are slightly shorter than one


@pytest.mark.parametrize("lengths", [(1,), (4,), (5,), (23,), (1, 9, 4, 13, 2), (3, 0, 6)])
def test_chunks_give_what_a_token_at_a_time_gives(lengths):
    offsets = torch.tensor([0, *lengths]).cumsum(0).tolist()
    given = inputs(offsets[-1])
    out = chunked_delta_rule(*given, rows_of(offsets))
    torch.testing.assert_close(out, token_by_token(*given, offsets), atol=1e-12, rtol=1e-12)


def test_a_sequence_does_not_see_what_it_is_packed_with():
    parts = [inputs(length, seed=length) for length in (6, 1, 11)]
    packed = [torch.cat(tensors) for tensors in zip(*parts, strict=True)]
    together = chunked_delta_rule(*packed, rows_of([0, 6, 7, 18])).split([6, 1, 11])
    for part, out in zip(parts, together, strict=True):
        torch.testing.assert_close(out, chunked_delta_rule(*part, rows_of([0, len(part[0])])))


def test_gradients_are_finite_differences():
    given = [tensor.requires_grad_() for tensor in inputs(7, heads=1, ratio=2, dk=2, dv=3)]
    rows = rows_of([0, 5, 7], chunk=3)
    assert torch.autograd.gradcheck(lambda *x: chunked_delta_rule(*x, rows), given)


def test_gradients_are_those_of_a_token_at_a_time():
    given, offsets = inputs(20), [0, 3, 20]
    weight = torch.randn(20, 2, 3, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    results = []
    for rule, packing in ((chunked_delta_rule, rows_of(offsets)), (token_by_token, offsets)):
        leaves = [tensor.clone().requires_grad_() for tensor in given]
        results.append(torch.autograd.grad((rule(*leaves, packing) * weight).sum(), leaves))
    for mine, plain in zip(*results, strict=True):
        torch.testing.assert_close(mine, plain, atol=1e-11, rtol=1e-9)


def test_strong_decays_over_long_chunks_stay_finite():
    given = [tensor.float() for tensor in inputs(200)]
    given[3] = torch.full_like(given[3], -30.0)
    leaves = [tensor.requires_grad_() for tensor in given]
    out = chunked_delta_rule(*leaves, rows_of([0, 200], chunk=64))
    assert out.isfinite().all()
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(out.sum(), leaves))


def test_bf16_is_computed_in_fp32():
    given = [tensor.bfloat16() for tensor in inputs(40)]
    rows = rows_of([0, 40], chunk=16)
    out = gated_delta_rule(*given, rows)
    exact = chunked_delta_rule(*(tensor.float() for tensor in given), rows)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, exact.bfloat16())


def test_the_kernels_are_not_asked_for_without_cuda(monkeypatch):
    def fail() -> None:
        raise AssertionError("looked for kernels")

    monkeypatch.setattr(delta_rule, "fla_kernel", fail)
    given = inputs(3)
    assert gated_delta_rule(*given, rows_of([0, 3])).shape == given[2].shape
