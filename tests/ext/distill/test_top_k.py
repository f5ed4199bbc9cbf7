"""The divergence from a teacher's likeliest tokens, against the full distributions in float64."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

from slime.algorithms.log_probs import logits_of
from slime.ext.distill.top_k import reverse_kl_on_top, top_logits
from tests.dist.test_log_probs_tp import COLUMNS, problem
from tests.matrix.pool import run_ranks


def both(seed=0, rows=4, vocabulary=7):
    generator = torch.Generator().manual_seed(seed)
    student, teacher = torch.randn(2, rows, vocabulary, generator=generator, dtype=torch.float64)
    return student.log_softmax(-1), teacher.log_softmax(-1)


def on_top(student, teacher, k):
    best = teacher.topk(k, dim=-1)
    return reverse_kl_on_top(student.gather(1, best.indices), best.values)


def test_a_hand_value():
    student = torch.tensor([[0.5, 0.3, 0.2]]).log()
    teacher = torch.tensor([[0.6, 0.3, 0.1]]).log()
    expected = 0.5 * math.log(0.5 / 0.6) + 0.2 * math.log(0.2 / 0.1)
    assert float(on_top(student, teacher, 2)) == pytest.approx(expected, abs=1e-6)
    # One token against all others.
    assert float(on_top(student, teacher, 1)) == pytest.approx(
        0.5 * math.log(0.5 / 0.6) + 0.5 * math.log(0.5 / 0.4), abs=1e-6
    )


def test_the_whole_vocabulary_gives_the_reverse_kl_and_its_gradient():
    student, teacher = both()
    leaf = student.clone().requires_grad_()
    again = student.clone().requires_grad_()
    value = on_top(leaf.log_softmax(-1), teacher, 7)
    whole = (again.log_softmax(-1).exp() * (again.log_softmax(-1) - teacher)).sum(-1)
    torch.testing.assert_close(value, whole, atol=1e-9, rtol=1e-9)
    value.sum().backward()
    whole.sum().backward()
    torch.testing.assert_close(leaf.grad, again.grad, atol=1e-8, rtol=1e-8)


def test_the_gradient_is_that_of_the_formula():
    student, teacher = both()
    logits = student.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda z: on_top(z.log_softmax(-1), teacher, 3), (logits,))


def test_the_largest_logits_leave_out_the_padding():
    logits = torch.tensor([[1.0, 5.0, 3.0, 9.0], [4.0, 2.0, 3.0, 9.0], [0.0, 1.0, 2.0, 9.0]])
    ids, values = top_logits(logits, torch.tensor([0, 2]), 2, vocab_size=3, rows_per_chunk=1)
    assert (ids.tolist(), values.tolist()) == ([[1, 2], [2, 1]], [[5.0, 3.0], [2.0, 1.0]])


def top_on_rank() -> dict:
    rank, size = dist.get_rank(), dist.get_world_size()
    logits, _, _, _ = problem()
    shard = logits[:, rank * COLUMNS // size : (rank + 1) * COLUMNS // size].float().clone().requires_grad_()
    padding = 2  # the last columns of the last shard
    rows = torch.tensor([4, 0, 6])
    ids, values = top_logits(
        shard.detach(), rows, 5, tp_group=dist.group.WORLD, vocab_size=COLUMNS - padding, rows_per_chunk=2
    )
    chosen = logits_of(shard, rows, ids, tp_group=dist.group.WORLD)
    (chosen * torch.arange(1.0, 6.0)).sum().backward()
    found = {"ids": ids, "values": values, "chosen": chosen.detach(), "grad": shard.grad}
    return {name: tensor.tolist() for name, tensor in found.items()}


@pytest.mark.dist
def test_the_likeliest_tokens_of_a_sharded_vocabulary():
    ranks = run_ranks(top_on_rank, 2)
    logits, _, _, _ = problem()
    whole = logits.float().requires_grad_()
    best = whole[[4, 0, 6], :-2].topk(5, dim=-1)
    (best.values * torch.arange(1.0, 6.0)).sum().backward()
    for result in ranks:
        assert result["ids"] == best.indices.tolist()
        assert result["values"] == result["chosen"] == best.values.tolist()
    joined = torch.cat([torch.tensor(result["grad"]) for result in ranks], dim=1)
    assert joined.tolist() == whole.grad.tolist()
