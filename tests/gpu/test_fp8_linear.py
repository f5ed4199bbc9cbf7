"""FP8 products on Hopper: cuBLAS's against plain numbers, the tiles' bytes against the push quantizer's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels need Triton, which is installed on GPU machines")

from slime.backends.megatron_utils import cpu_platform  # noqa: E402, F401
from slime.ext.low_precision import fp8_kernels, fp8_linear  # noqa: E402
from slime.ext.low_precision.fp8_linear import Fp8Product  # noqa: E402
from slime.weights.quantize.block_fp8 import quantize_block  # noqa: E402

pytestmark = [pytest.mark.gpu(1), pytest.mark.timeout(300)]


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator)


@pytest.mark.parametrize("rows", [1, 127, 128, 300])
def test_tiles_have_the_bytes_and_scales_of_the_push_quantizer(rows: int) -> None:
    x = draw(rows, 640)
    codes, scales = fp8_kernels._quantize(x, by_block=False, transposed=False)
    expected, expected_scales = quantize_block(x, (1, 128))
    assert torch.equal(codes[:rows].view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(scales[:rows], expected_scales)
    codes, scales = fp8_kernels._quantize(x, by_block=False, transposed=True)
    expected, expected_scales = quantize_block(x.t().contiguous(), (1, 128))
    assert torch.equal(codes[:, :rows].view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(scales, expected_scales)


@pytest.mark.parametrize("transposed", [False, True])
def test_blocks_have_the_bytes_and_scales_of_the_push_quantizer(transposed: bool) -> None:
    weight = draw(384, 640)
    codes, scales = fp8_kernels._quantize(weight, by_block=True, transposed=transposed)
    expected, expected_scales = quantize_block(weight)
    codes = codes.t() if transposed else codes
    assert torch.equal(codes.contiguous().view(torch.uint8), expected.view(torch.uint8))
    # cuBLAS reads [inner, outer], padded along the inner blocks.
    outer, inner = expected_scales.shape[::-1] if transposed else expected_scales.shape
    found = scales[:inner, :outer]
    assert torch.equal(found if transposed else found.t(), expected_scales)


@pytest.mark.parametrize(("tokens", "inputs", "outputs"), [(1, 128, 128), (200, 1024, 3072), (4096, 3072, 1024)])
def test_the_three_products_are_those_of_plain_numbers(
    tokens: int, inputs: int, outputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fp8_kernels.are_proven(torch.device("cuda", 0)), "torch's block-scaled products do not work here"
    grad = draw(tokens, outputs, seed=2)
    results = []
    for kernels in (fp8_linear.kernels_for, lambda x, weight: None):
        monkeypatch.setattr(fp8_linear, "kernels_for", kernels)
        x, weight = draw(tokens, inputs).requires_grad_(), draw(outputs, inputs, seed=1).requires_grad_()
        y = Fp8Product.apply(x, weight)
        y.backward(grad)
        results.append((y, x.grad, weight.grad))
    for found, plain in zip(*results, strict=True):
        assert float((found - plain).abs().max() / plain.abs().max()) < 2e-2
