"""The fused log-prob kernels on CUDA against the plain path in fp64: values, gradients, padding, rows, shards."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from slime.algorithms import log_probs
from slime.algorithms.log_probs import vocab_parallel_log_probs

pytestmark = [pytest.mark.gpu(1), pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

ROWS, COLUMNS, PADDING = 70, 9001, 119


def problem(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    logits = 4 * torch.randn(ROWS, COLUMNS + PADDING, device="cuda", generator=generator)
    logits[:, COLUMNS:] = 50.0  # padding that would dominate every row
    logits[3, 17] = float("-inf")
    logits[5] *= 20  # large, but small enough that float32 keeps the fourth digit of a probability
    rows = torch.randperm(ROWS, device="cuda", generator=generator)[:41]
    targets = torch.randint(0, COLUMNS, (41,), device="cuda", generator=generator)
    return logits.to(dtype), rows, targets


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_kernels_give_the_values_and_gradients_of_the_plain_path(dtype, with_entropy, overwrite, temperature):
    logits, rows, targets = problem(dtype)
    assert log_probs._kernels_for(logits) is not None, "Triton is part of torch on CUDA"
    settings = {"rows_R": rows, "vocab_size": COLUMNS, "with_entropy": with_entropy, "temperature": temperature}
    weights = torch.linspace(-1, 1, len(rows), device="cuda", dtype=torch.float64)

    def run(values, **more):
        leaf = values.clone().requires_grad_()
        log_prob, entropy = vocab_parallel_log_probs(leaf * 1, targets, **settings, **more)
        loss = (log_prob.double() * weights).sum()
        if entropy is not None:
            loss = loss + 0.3 * (entropy.double() * weights).sum()
        loss.backward()
        return log_prob.detach().double(), None if entropy is None else entropy.detach().double(), leaf.grad

    found = run(logits, overwrite_logits=overwrite)
    wanted = run(logits.double())
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-6, atol=3e-6)
    if with_entropy:
        torch.testing.assert_close(found[1], wanted[1], rtol=1e-5, atol=3e-6)
    rtol, atol = (1e-4, 1e-6) if dtype == torch.float32 else (1e-2, 1e-5)
    torch.testing.assert_close(found[2].double(), wanted[2], rtol=rtol, atol=atol)
    assert torch.equal(found[2][:, COLUMNS:], torch.zeros_like(found[2][:, COLUMNS:]))


def test_a_shard_that_is_all_padding_has_no_probability():
    from slime.algorithms import log_probs_kernels

    logits, rows, targets = problem(torch.bfloat16)
    largest, sums = log_probs_kernels.row_sums(
        logits, rows_R=rows, local_target_R=targets, with_entropy=True, temperature=1.0, num_columns=0
    )
    assert torch.equal(sums, torch.zeros_like(sums))
    assert largest.isfinite().all()


def test_two_shards_of_one_row_add_up():
    logits, rows, targets = problem(torch.float32)
    whole = vocab_parallel_log_probs(logits, targets, rows_R=rows, vocab_size=COLUMNS, with_entropy=True)
    half = logits.shape[1] // 2
    parts = []
    for rank in range(2):
        shard = logits[:, rank * half : (rank + 1) * half]  # strided: the columns of a row are contiguous
        columns = min(max(COLUMNS - rank * half, 0), half)
        kernels = log_probs._kernels_for(shard)
        arguments = {"rows_R": rows, "local_target_R": targets - rank * half, "with_entropy": True}
        parts.append(kernels.row_sums(shard, temperature=1.0, num_columns=columns, **arguments))
    top = torch.maximum(parts[0][0], parts[1][0])
    total = sum(sums[0] * (largest - top).exp() for largest, sums in parts)
    target = sum(sums[1] for _, sums in parts)
    torch.testing.assert_close(target - top - total.log(), whole[0], rtol=1e-5, atol=1e-5)


def test_no_rows_leave_a_gradient_of_zeros():
    logits, _, _ = problem(torch.bfloat16)
    leaf = logits.requires_grad_()
    empty = torch.zeros(0, dtype=torch.int64, device="cuda")
    log_prob, _ = vocab_parallel_log_probs(leaf * 1, empty, rows_R=empty, overwrite_logits=True)
    log_prob.sum().backward()
    assert torch.equal(leaf.grad, torch.zeros_like(leaf))


def test_without_triton_the_plain_path_is_taken():
    logits, rows, targets = problem(torch.bfloat16)
    with mock.patch.object(log_probs, "_kernels_for", lambda logits: None):
        plain, _ = vocab_parallel_log_probs(logits, targets, rows_R=rows, vocab_size=COLUMNS)
    fused, _ = vocab_parallel_log_probs(logits, targets, rows_R=rows, vocab_size=COLUMNS)
    torch.testing.assert_close(fused, plain, rtol=1e-6, atol=3e-6)
