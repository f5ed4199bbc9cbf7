"""Quantization by torch on a GPU gives the same bytes as on a CPU, which are tested against numpy."""

from __future__ import annotations

import pytest
import torch

from slime.weights.quantize.block_fp8 import transform_scale_ue8m0
from slime.weights.quantize.formats import BlockFp8, ChannelFp8, GroupInt, TensorFp8, WeightFormat

pytestmark = [pytest.mark.gpu(1), pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

FORMATS: dict[str, WeightFormat] = {
    "block": BlockFp8((128, 128)),
    "block ue8m0": BlockFp8((128, 128), ue8m0=True),
    "channel": ChannelFp8(),
    "tensor": TensorFp8(),
    "int4": GroupInt(4, 32, True),
    "int4 asymmetric": GroupInt(4, 32, False),
    "int8 rows": GroupInt(8, None, True, torch.float32),
}
NAME = "model.layers.0.mlp.experts.0.up_proj.weight"


def weights(dtype: torch.dtype) -> list[torch.Tensor]:
    """Awkward and large shapes, magnitudes over many powers of two, a corner of zeros."""
    generator = torch.Generator().manual_seed(0)
    result = []
    for rows, columns in ((1, 32), (129, 288), (768, 2048), (6000, 4096)):
        weight = torch.randn(rows, columns, generator=generator)
        weight *= torch.exp2(torch.randint(-16, 3, (rows, 1), generator=generator))
        weight[: rows // 2, : columns // 2] = 0
        result.append(weight.to(dtype))
    return result


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_has_the_same_bytes_on_both_devices(name: str, dtype: torch.dtype) -> None:
    how = FORMATS[name]
    for weight in weights(dtype):
        on_cpu = how.quantize(NAME, weight, check_finite=True)
        on_gpu = how.quantize(NAME, weight.cuda(), check_finite=True)
        for part, tensor in on_cpu.items():
            found = on_gpu[part]
            assert found.is_cuda
            assert torch.equal(found.cpu().view(torch.uint8), tensor.view(torch.uint8)), (part, tuple(weight.shape))
        restored = how.dequantize(NAME, on_gpu)
        assert torch.equal(restored.cpu(), how.dequantize(NAME, on_cpu))


def test_packed_exponents_are_the_same_on_both_devices() -> None:
    scale = torch.exp2(torch.arange(-20, 20).float()).view(8, 5)
    on_gpu = transform_scale_ue8m0(scale.cuda(), mn=1000)
    on_cpu = transform_scale_ue8m0(scale, mn=1000)
    assert on_gpu.stride() == on_cpu.stride()
    assert torch.equal(on_gpu.cpu(), on_cpu)
