"""The kernel of int4 quantization-aware training: the quantizer's values, its gradient, and roughly its speed."""

from __future__ import annotations

import pytest
import torch

from slime.ext.low_precision.rounding import fake_quantize_int4, rounded_to_int4
from slime.weights.quantize.formats import GroupInt

pytestmark = [pytest.mark.gpu(1), pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

NAME = "model.layers.0.mlp.experts.0.up_proj.weight"


def weights(dtype: torch.dtype) -> list[torch.Tensor]:
    """Awkward and large shapes, stacks of experts, magnitudes over many powers of two, zeros, exact ties."""
    generator = torch.Generator().manual_seed(0)
    result = []
    for shape in ((1, 128), (129, 384), (3, 768, 2048), (6001, 4096)):
        weight = torch.randn(*shape, generator=generator)
        weight *= torch.exp2(torch.randint(-24, 3, (*shape[:-1], 1), generator=generator))
        weight[..., : shape[-2] // 2, :32] = 0
        result.append(weight.to(dtype))
    ties = torch.arange(-14, 14).float() / 2  # the scale is 1: halves are rounded to even
    ties = torch.cat([ties, torch.tensor([7.0, -7.0, 0.25, -0.25])]).repeat(4)
    return [*result, ties[None].to(dtype)]


@pytest.mark.parametrize("group_size", [32, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_kernel_gives_the_quantizers_values_to_the_bit(dtype: torch.dtype, group_size: int) -> None:
    how = GroupInt(4, group_size, True, dtype)
    for weight in weights(dtype):
        found = rounded_to_int4(weight.cuda(), group_size, use_triton=True)
        assert (found.shape, found.dtype) == (weight.shape, dtype)
        expected = rounded_to_int4(weight, group_size)
        bits = torch.int32 if dtype == torch.float32 else torch.int16
        assert torch.equal(found.cpu().view(bits), expected.view(bits)), tuple(weight.shape)
        rows = weight.view(-1, weight.size(-1)).cuda()
        on_gpu = rounded_to_int4(rows, group_size, use_triton=False)
        assert torch.equal(on_gpu.cpu().view(bits), expected.view(-1, weight.size(-1)).view(bits))
        if dtype == torch.bfloat16:
            served = how.dequantize(NAME, how.quantize(NAME, rows, check_finite=True))
            assert torch.equal(served.view(bits), found.view(-1, weight.size(-1)).view(bits))


def test_the_gradient_is_that_of_the_rounded_weight() -> None:
    weight = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    upstream = torch.randn_like(weight)
    fake_quantize_int4(weight, 32).backward(upstream)
    assert weight.grad is not None
    assert torch.equal(weight.grad, upstream)


def test_a_nan_stays_in_its_group() -> None:
    weight = torch.ones(2, 64, device="cuda")
    weight[0, 3] = torch.nan
    found = rounded_to_int4(weight, 32, use_triton=True)
    assert found[0, :32].isnan().all()
    assert not found[0, 32:].isnan().any()
    assert not found[1].isnan().any()
