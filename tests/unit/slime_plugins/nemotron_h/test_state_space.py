"""Mamba-2's state space: values by hand, chunks against single tokens, gradients, the kernel's arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from slime_plugins.models.nemotron_h.state_space import by_kernel, chunked_state_space
from slime_plugins.models.qwen3_next.packed_rows import PackedRows


def token_by_token(
    query: Tensor, key: Tensor, value: Tensor, step: Tensor, rate: Tensor, skip: Tensor, offsets: list[int]
) -> Tensor:
    """The definition: one state per head, zero at the start of each sequence."""
    outputs = []
    for begin, end in zip(offsets, offsets[1:], strict=False):
        state = value.new_zeros(*value.shape[1:3], key.size(-1), value.size(-1))
        for t in range(begin, end):
            written = torch.einsum("gk,gr,grv->grkv", key[t], step[t], value[t])
            state = state * (step[t] * rate).exp()[..., None, None] + written
            outputs.append(torch.einsum("grkv,gk->grv", state, query[t]) + skip[..., None] * value[t])
    return torch.stack(outputs)


def inputs(num_tokens: int, *, groups: int = 2, ratio: int = 3, dk: int = 5, dv: int = 7) -> list[Tensor]:
    """fp64 inputs; decays from nearly none to nearly everything."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    heads = (groups, ratio)
    query, key, value = (normal(num_tokens, *shape) for shape in ((groups, dk), (groups, dk), (*heads, dv)))
    return [query, key, value, normal(num_tokens, *heads).exp(), -(2 * normal(*heads)).exp(), normal(*heads)]


def rows_of(offsets: list[int], chunk: int = 4) -> PackedRows:
    return PackedRows.from_offsets(offsets, conv_width=3, chunk=chunk)


def test_two_tokens_by_hand():
    one = torch.ones(2, 1, 1, dtype=torch.float64)
    value = torch.tensor([8.0, 1.0], dtype=torch.float64).view(2, 1, 1, 1)
    step = torch.tensor([0.5, 0.25], dtype=torch.float64).view(2, 1, 1)
    rate = torch.tensor([[0.5]], dtype=torch.float64).log() * 4  # a step of a quarter halves the state
    out = chunked_state_space(2 * one, 3 * one, value, step, rate, torch.tensor([[10.0]]), rows_of([0, 2]))
    first, second = 3 * 0.5 * 8.0, 0.5 * 3 * 0.5 * 8.0 + 3 * 0.25 * 1.0
    assert out.flatten().tolist() == pytest.approx([2 * first + 80.0, 2 * second + 10.0])


@pytest.mark.parametrize("lengths", [(1,), (4,), (23,), (1, 9, 4, 13, 2), (3, 0, 6)])
def test_chunks_give_what_a_token_at_a_time_gives(lengths):
    offsets = torch.tensor([0, *lengths]).cumsum(0).tolist()
    given = [x.requires_grad_() for x in inputs(offsets[-1])]
    out, expected = chunked_state_space(*given, rows_of(offsets)), token_by_token(*given, offsets)
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=1e-12)
    gradients = (torch.autograd.grad(x.square().sum(), given) for x in (out, expected))
    for actual, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(actual, wanted, atol=1e-10, rtol=1e-10)


def test_a_kernel_is_told_where_sequences_begin():
    def kernel(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, chunk_size: int, **more: Any) -> Tensor:
        """``mamba_chunk_scan_combined``'s arguments and shapes, token by token."""
        lengths = torch.bincount(more["seq_idx"][0]).tolist()
        assert more["seq_idx"].dtype == torch.int32 and lengths == [2, 5]
        heads = (b.size(2), -1)
        value, step = x[0].unflatten(1, heads), dt[0].unflatten(1, heads)
        rate, skip = a.unflatten(0, heads), more["D"].unflatten(0, heads)
        return token_by_token(c[0], b[0], value, step, rate, skip, [0, 2, 7]).flatten(1, 2)[None]

    given, rows = inputs(7), rows_of([0, 2, 2, 7])
    torch.testing.assert_close(by_kernel(kernel, *given, rows), chunked_state_space(*given, rows))
