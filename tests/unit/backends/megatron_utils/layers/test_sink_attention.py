"""Attention with sinks against its formula in fp64: packed, with windows, and under context parallelism."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from slime.backends.megatron_utils.layers import attention
from tests.unit.backends.megatron_utils.layers.test_attention import check_zigzag

SINKS = torch.tensor([-2.0, 0.0, 1.5, 4.0])


def random_qkv(length: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(length, heads, 4, generator=generator) * 2 for heads in (4, 2, 2))  # type: ignore


def textbook(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, window: int | None = None) -> Tensor:
    """exp(s_ij) / (exp(sink) + sum_k exp(s_ik)), head by head and query by query."""
    out = []
    for i in range(len(query)):
        first = 0 if window is None else max(0, i + 1 - window)
        for head in range(query.size(1)):
            group = head // (query.size(1) // key.size(1))
            scores = key[first : i + 1, group].double() @ query[i, head].double() * 0.5
            weights = scores.exp() / (sinks[head].double().exp() + scores.exp().sum())
            out.append(weights @ value[first : i + 1, group].double())
    return torch.stack(out).view(query.shape)


@pytest.mark.parametrize("window", [None, 1, 3, 100])
def test_outputs_and_gradients_are_those_of_the_formula(window: int | None) -> None:
    lengths = [3, 1, 6]
    results = []
    for is_ours in (True, False):
        leaves = [x.clone().requires_grad_() for x in (*random_qkv(10), SINKS)]
        query, key, value, sinks = leaves
        if is_ours:
            out = attention.per_sequence_attention(
                query, key, value, lengths, lengths, scale=0.5, window=window, sinks=sinks
            )
        else:
            parts = zip(*(x.split(lengths) for x in (query, key, value)), strict=True)
            out = torch.cat([textbook(*part, sinks, window) for part in parts])
        (out.double() * torch.linspace(-1, 1, 4).double()).sum().backward()
        results.append([out.detach().double(), *(leaf.grad.double() for leaf in leaves)])
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, atol=2e-6, rtol=1e-5)
    assert results[0][-1].abs().min() > 1e-3  # every sink has a gradient


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("cp_size", [2, 3])
def test_a_sink_counts_once_for_a_query_however_many_ranks_hold_its_keys(
    monkeypatch: pytest.MonkeyPatch, cp_size: int, window: int | None
) -> None:
    lengths = [2 * cp_size * chunk for chunk in (1, 3, 2)]
    qkv = random_qkv(sum(lengths))
    parts = zip(*(x.split(lengths) for x in qkv), strict=True)
    expected = torch.cat([textbook(*part, SINKS, window) for part in parts])

    def attend(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, *_: int) -> Tensor:
        sizes = cu_q.diff().tolist(), cu_k.diff().tolist()
        return attention.per_sequence_attention(q, k, v, *sizes, scale=0.5, window=window, sinks=SINKS)

    check_zigzag(monkeypatch, attend, qkv, lengths, cp_size, expected)
