"""MiniMax-M2's norm over all heads on tensor-parallel ranks: values and gradients of the plain formula."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from slime_plugins.models.minimax_m2 import _SharedRmsNorm
from tests.matrix.pool import RankPool

pytestmark = pytest.mark.dist

TOKENS, HEADS, WIDTH, EPS = 5, 4, 3, 1e-3
"""A large epsilon, so that a norm that divides it too is seen."""


def problem() -> tuple[Tensor, Tensor, Tensor]:
    """Heads of all ranks, their weight, and what the result is multiplied by to be a loss; float64."""
    generator = torch.Generator().manual_seed(0)
    x, weight, factor = (
        torch.randn(*size, HEADS, WIDTH, generator=generator, dtype=torch.float64)
        for size in ((TOKENS, 1), (), (TOKENS, 1))
    )
    return x, weight, factor


def plain() -> dict[str, Any]:
    x, weight, factor = (tensor.requires_grad_() for tensor in problem())
    normed = x / (x.square().mean(dim=(-2, -1), keepdim=True) + EPS).sqrt() * weight
    (normed * factor).sum().backward()
    return {"normed": normed.detach(), "x": x.grad, "weight": weight.grad}


def on_rank(heads_of_rank: list[list[int]]) -> dict[str, Any]:
    """This rank's heads only; a head that several have is multiplied by a part of its factor on each."""
    heads = heads_of_rank[dist.get_rank()]
    copies = sum(heads == others for others in heads_of_rank)
    x, weight, factor = (tensor[..., heads, :].requires_grad_() for tensor in problem())
    assert dist.group.WORLD is not None
    normed = _SharedRmsNorm.apply(x, weight, EPS, copies * HEADS * WIDTH, dist.group.WORLD)
    part = 1.0 if copies == 1 else [0.25, 0.75][dist.get_rank() % copies]
    (normed * factor * part).sum().backward()
    return {"normed": normed.tolist(), "x": x.grad.tolist(), "weight": weight.grad.tolist()}


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool() as pool:
        yield pool


@pytest.mark.parametrize(
    "heads_of_rank",
    [[[0, 1], [2, 3]], [[0], [1], [2], [3]], [[0, 1], [0, 1], [2, 3], [2, 3]]],
    ids=["two ranks", "four ranks", "ranks that share heads"],
)
def test_ranks_with_some_heads_compute_the_norm_over_all(pool: RankPool, heads_of_rank: list[list[int]]) -> None:
    expected = plain()
    results = pool.run(on_rank, len(heads_of_rank), heads_of_rank)
    totals = {name: torch.zeros_like(expected[name]) for name in ("x", "weight")}
    for heads, result in zip(heads_of_rank, results, strict=True):
        mine = {name: torch.tensor(value, dtype=torch.float64) for name, value in result.items()}
        torch.testing.assert_close(mine["normed"], expected["normed"][..., heads, :], rtol=1e-12, atol=1e-12)
        for name, total in totals.items():
            total[..., heads, :] += mine[name]
    for name, total in totals.items():
        torch.testing.assert_close(total, expected[name], rtol=1e-12, atol=1e-12)
