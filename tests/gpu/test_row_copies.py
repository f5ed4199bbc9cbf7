"""Sums of copied rows on CUDA: the kernel against fp64, bitwise repeatable, without host waits."""

from __future__ import annotations

import pytest
import torch

from slime.backends.megatron_utils.layers.row_copies import RowCopies, copy_rows, sum_copies

pytestmark = [pytest.mark.gpu(1), pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


@pytest.mark.parametrize("shape", [(2048,), (2, 128), (5120,), (7,), (1,)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_sums_and_gradients_equal_fp64(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    num_rows, num_copies = 700, 3000
    draw = torch.Generator("cuda").manual_seed(1)
    row_of_copy = torch.randint(num_rows - 50, (num_copies,), generator=draw, device="cuda")  # some rows have none
    copies = RowCopies.of(row_of_copy, num_rows)
    x = torch.randn(num_copies, *shape, generator=draw, device="cuda").to(dtype)
    # Freed blocks of memory are full of these, so that rows skipped by the kernel show.
    dirt = [torch.full((1 << 22,), torch.nan, device="cuda") for _ in range(8)]
    del dirt
    actual = sum_copies(x, copies)
    exact = torch.zeros(num_rows, *shape, dtype=torch.float64, device="cuda").index_add_(0, row_of_copy, x.double())
    torch.testing.assert_close(actual, exact.to(dtype))
    assert torch.equal(actual, sum_copies(x, copies))
    rows = torch.randn(num_rows, *shape, generator=draw, device="cuda").to(dtype).requires_grad_()
    copied = copy_rows(rows, copies)
    assert torch.equal(copied, rows[row_of_copy])
    copied.backward(x)
    assert rows.grad is not None and torch.equal(rows.grad, actual)


def test_the_host_waits_for_nothing() -> None:
    row_of_copy = torch.randint(64, (512,), device="cuda")
    x = torch.randn(512, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    sum_copies(x, RowCopies.of(row_of_copy, 64)).sum().backward()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        sum_copies(x, RowCopies.of(row_of_copy, 64)).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
