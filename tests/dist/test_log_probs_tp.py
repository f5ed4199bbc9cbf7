"""Vocabulary and data shards on real gloo ranks against the same numbers on one."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from slime.algorithms.advantages.whitening import whiten
from slime.algorithms.log_probs import vocab_parallel_log_probs
from tests.matrix.pool import run_ranks

ROWS, COLUMNS = 7, 12


def problem() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(ROWS, COLUMNS, generator=generator, dtype=torch.float64)
    targets = torch.tensor([0, 5, 6, 11, 3, 8, 2])
    keep = torch.rand(ROWS, COLUMNS, generator=generator) > 0.4
    keep[3, : COLUMNS // 2] = False  # a shard without any kept token
    weights = torch.randn(2, ROWS, generator=generator, dtype=torch.float64)
    return logits, targets, keep, weights


SETTINGS = [
    {"with_entropy": with_entropy, "chunk_size": chunk_size, "temperature": temperature, "masked": masked}
    for with_entropy, chunk_size, temperature, masked in [
        (True, -1, 1.0, False),
        (True, 3, 0.7, False),
        (True, 2, 1.3, True),
        (False, 3, 1.0, True),
        (False, -1, 1.0, False),
    ]
]


def evaluate(setting: dict, tp_rank: int, tp_size: int, group: dist.ProcessGroup | None) -> dict:
    """Values and the gradient of a weighted sum of them, on this rank's columns."""
    logits, targets, keep, weights = problem()
    columns = slice(tp_rank * COLUMNS // tp_size, (tp_rank + 1) * COLUMNS // tp_size)
    shard = logits[:, columns].clone().requires_grad_()
    log_prob, entropy = vocab_parallel_log_probs(
        shard,
        targets,
        tp_group=group,
        chunk_size=setting["chunk_size"],
        with_entropy=setting["with_entropy"],
        temperature=setting["temperature"],
        keep=keep[:, columns] if setting["masked"] else None,
    )
    loss = (log_prob * weights[0]).sum()
    if entropy is not None:
        loss = loss + (entropy * weights[1]).sum()
    loss.backward()
    return {
        "log_prob": log_prob.tolist(),
        "entropy": None if entropy is None else entropy.tolist(),
        "grad": shard.grad.tolist(),
    }


SHARDS = [([[1.0, 4.0], [3.0]], [[1, 0], [1]]), ([[7.0, 2.0, 9.0]], [[1, 1, 0]])]


def whiten_on_rank(num_with_tokens: int) -> list[list[float]]:
    """The rows of this rank, whitened with those of the first ``num_with_tokens`` ranks."""
    rows, masks = SHARDS[dist.get_rank()] if dist.get_rank() < num_with_tokens else ([], [])
    tensors = whiten(
        [torch.tensor(row) for row in rows], [torch.tensor(mask) for mask in masks], group=dist.group.WORLD
    )
    return [tensor.tolist() for tensor in tensors]


def everything_on_rank() -> tuple[list[dict], list[list[list[float]]]]:
    rank, size = dist.get_rank(), dist.get_world_size()
    log_probs = [evaluate(setting, rank, size, dist.group.WORLD) for setting in SETTINGS]
    return log_probs, [whiten_on_rank(num_with_tokens) for num_with_tokens in (1, 2)]


@pytest.fixture(scope="module")
def ranks() -> list[tuple[list[dict], list[list[list[float]]]]]:
    """Results of both ranks; all tests here share one start of two processes."""
    return run_ranks(everything_on_rank, 2)


@pytest.mark.dist
def test_two_vocabulary_shards_equal_one(ranks):
    expected = [evaluate(setting, 0, 1, None) for setting in SETTINGS]
    per_rank = [log_probs for log_probs, _ in ranks]
    for setting, wanted, *found in zip(SETTINGS, expected, *per_rank, strict=True):
        for result in found:
            assert result["log_prob"] == pytest.approx(wanted["log_prob"], abs=1e-12), setting
            if setting["with_entropy"]:
                assert result["entropy"] == pytest.approx(wanted["entropy"], abs=1e-12), setting
        joined = torch.cat([torch.tensor(result["grad"], dtype=torch.float64) for result in found], dim=1)
        torch.testing.assert_close(joined, torch.tensor(wanted["grad"], dtype=torch.float64))


@pytest.mark.dist
@pytest.mark.parametrize("num_with_tokens", [1, 2])
def test_whitening_counts_the_tokens_of_all_ranks(ranks, num_with_tokens):
    chosen = SHARDS[:num_with_tokens]
    rows = [torch.tensor(row) for shard, _ in chosen for row in shard]
    masks = [torch.tensor(mask) for _, shard in chosen for mask in shard]
    wanted = [tensor.tolist() for tensor in whiten(rows, masks)]
    found = [row for _, whitened in ranks for row in whitened[num_with_tokens - 1]]
    assert len(found) == len(wanted)
    for row, expected in zip(found, wanted, strict=True):
        assert row == pytest.approx(expected)
