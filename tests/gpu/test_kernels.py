"""Triton kernels against plain torch on a GPU."""

from __future__ import annotations

import pytest
import torch

from slime.backends.megatron_utils.layers.rotary import RotaryTables, apply_rotary, rotate

pytestmark = pytest.mark.gpu(1)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("heads", "width", "rotated"), [(32, 128, 128), (2, 128, 64), (5, 48, 24), (1, 64, 64)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_rotation_and_its_gradient_equal_plain_torch(
    interleaved: bool, heads: int, width: int, rotated: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    angles = torch.rand(77, rotated // 2, device="cuda") * 6
    tables = RotaryTables(angles.cos(), angles.sin())
    # A slice of a wider projection: strided, as queries and keys are.
    wide = torch.randn(77, heads, width + 16, device="cuda", dtype=dtype)
    x = wide[..., :width].detach().requires_grad_()
    out = apply_rotary(x, tables, interleaved=interleaved)
    exact_input = x.detach().double().requires_grad_()
    exact = rotate(exact_input, tables.cos.double(), tables.sin.double(), interleaved=interleaved)
    bound = 1e-2 if dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(out.double(), exact, atol=bound, rtol=bound)
    upstream = torch.randn_like(out)
    out.backward(upstream)
    exact.backward(upstream.double())
    assert x.grad is not None and exact_input.grad is not None
    torch.testing.assert_close(x.grad.double(), exact_input.grad, atol=bound, rtol=bound)
