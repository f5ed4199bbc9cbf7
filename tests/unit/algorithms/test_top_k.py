"""The divergence from a teacher's likeliest tokens against the whole distributions in float64."""

from __future__ import annotations

import math

import pytest
import torch

from slime.algorithms.top_k import logits_of, reverse_kl_on_top, top_logits


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
    # One token: it against all the others.
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


def test_logits_of_chosen_tokens_carry_their_gradient():
    logits = torch.randn(3, 4, requires_grad=True)
    chosen = logits_of(logits, torch.tensor([2, 0]), torch.tensor([[1, 3], [0, 0]]))
    torch.testing.assert_close(chosen, torch.stack([logits[2, [1, 3]], logits[0, [0, 0]]]))
    chosen.sum().backward()
    assert logits.grad.tolist() == [[2.0, 0, 0, 0], [0, 0, 0, 0], [0, 1.0, 0, 1.0]]
