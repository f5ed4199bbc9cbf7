"""Attention to listed keys: against dense attention in fp64, forward and backward, in blocks and in the kernels."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from slime_plugins.models.glm5 import sparse_attention as module
from slime_plugins.models.glm5.sparse_attention import sparse_attention
from tests.unit.triton_here import needs_triton

SCALE, VALUE_DIM = 0.3, 24


def make_case(dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys, and indices with 1, 16, 33, 37 and 0 of 40 slots filled, one of them with a gap in the middle."""
    generator = torch.Generator().manual_seed(seed)
    num_keys, listed = 37, (1, 16, 33, 37, 0)
    query = torch.randn(len(listed), 5, VALUE_DIM + 6, generator=generator).to(dtype).requires_grad_()
    key = torch.randn(num_keys, VALUE_DIM + 6, generator=generator).to(dtype).requires_grad_()
    indices = torch.full((len(listed), 40), -1, dtype=torch.int32)
    for row, count in enumerate(listed):
        indices[row, :count] = torch.randperm(num_keys, generator=generator)[:count].int()
    indices[2, 5] = -1
    weight = torch.randn(len(listed), 5, VALUE_DIM, generator=generator, dtype=torch.float64)
    return query, key, indices, weight


def dense_attention(query: Tensor, key: Tensor, indices: Tensor) -> Tensor:
    """Softmax over all keys, with unlisted keys masked."""
    rows = []
    for q, listed in zip(query, indices.tolist(), strict=True):
        chosen = [index for index in listed if index >= 0]
        if not chosen:
            rows.append(q[:, :VALUE_DIM] * 0)
            continue
        probabilities = (q @ key[chosen].T * SCALE).softmax(-1)
        rows.append(probabilities @ key[chosen][:, :VALUE_DIM])
    return torch.stack(rows)


def test_it_is_dense_attention_with_the_unlisted_keys_masked() -> None:
    query, key, indices, weight = make_case()
    out = sparse_attention(query, key, indices, scale=SCALE, value_dim=VALUE_DIM)
    grads = torch.autograd.grad((out * weight).sum(), (query, key))
    expected = dense_attention(query, key, indices)
    expected_grads = torch.autograd.grad((expected * weight).sum(), (query, key))
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    for actual, wanted in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-11, atol=1e-12)


def test_the_gradient_passes_gradcheck() -> None:
    query, key, indices, _ = make_case()

    def attend(query: Tensor, key: Tensor) -> Tensor:
        return sparse_attention(query, key, indices, scale=SCALE, value_dim=VALUE_DIM)

    assert torch.autograd.gradcheck(attend, (query[:, :2], key))


def test_blocks_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, indices, weight = make_case()

    def run() -> tuple[Tensor, ...]:
        out = sparse_attention(query, key, indices, scale=SCALE, value_dim=VALUE_DIM)
        return (out, *torch.autograd.grad((out * weight).sum(), (query, key)))

    at_once = run()
    monkeypatch.setitem(module._BLOCK_ELEMENTS, "cpu", 1)
    for actual, expected in zip(run(), at_once, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_a_query_without_keys_gives_zeros_and_no_gradient() -> None:
    query, key, indices, _ = make_case()
    out = sparse_attention(query, key, indices, scale=SCALE, value_dim=VALUE_DIM)
    assert not out[4].any()
    (grad,) = torch.autograd.grad(out.sum(), query)
    assert not grad[4].any() and grad.isfinite().all()


def run_kernels_in_the_interpreter() -> None:
    """Run in a process with TRITON_INTERPRET=1: the kernels on CPU tensors, against fp64."""
    from slime_plugins.models.glm5 import sparse_kernels
    from slime_plugins.models.glm5.indexer import index_scores

    for dtype, bound in ((torch.float32, 1e-6), (torch.float16, 2e-3)):
        query, key, indices, weight = make_case(dtype)
        out = sparse_kernels.SparseAttentionKernel.apply(query, key, indices, SCALE, VALUE_DIM)
        actual = (out, *torch.autograd.grad((out * weight.to(dtype)).sum(), (query, key)))
        query, key = (x.detach().double().requires_grad_() for x in (query, key))
        out = sparse_attention(query, key, indices, scale=SCALE, value_dim=VALUE_DIM)
        expected = (out, *torch.autograd.grad((out * weight.to(dtype).double()).sum(), (query, key)))
        for got, wanted in zip(actual, expected, strict=True):
            assert (got.double() - wanted).norm() <= bound * wanted.norm()
    query, weight, key = torch.randn(70, 3, 20), torch.randn(70, 3), torch.randn(131, 20)
    scores = sparse_kernels.index_scores_kernel(query, weight, key)
    torch.testing.assert_close(scores, index_scores(query, weight, key), rtol=1e-5, atol=1e-5)


@needs_triton
def test_the_kernels_compute_the_same_in_tritons_interpreter() -> None:
    program = f"import sys; sys.path.insert(0, {os.getcwd()!r})\n" + (
        "import importlib.util\n"
        f"spec = importlib.util.spec_from_file_location('case', {__file__!r})\n"
        "case = importlib.util.module_from_spec(spec); spec.loader.exec_module(case)\n"
        "case.run_kernels_in_the_interpreter()"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr[-3000:]
