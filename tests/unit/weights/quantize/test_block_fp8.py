"""FP8 by block, row and matrix, and power-of-two scales, against the format's table of numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from slime.utils.errors import DataError
from slime.weights.quantize import block_fp8
from slime.weights.quantize.block_fp8 import (
    FP8,
    dequantize_block,
    is_power_of_two,
    num_blocks,
    quantize_block,
    quantize_channel,
    quantize_tensor,
    transform_scale_ue8m0,
)
from tests.unit.weights.quantize.fp8_reference import as_bytes, e4m3_bytes, quantize

SHAPES = ((256, 384), (1, 1), (130, 257), (127, 128), (5, 300), (300, 5))


def random_weight(rows, columns, dtype=torch.float32, seed=0):
    """Magnitudes over many powers of two, so that blocks also have subnormal results."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator)
    return (weight * torch.exp2(torch.randint(-18, 3, (rows, columns), generator=generator))).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_equal_the_numpy_reference_bit_for_bit(shape, dtype):
    weight = random_weight(*shape, dtype)
    quantized, scale = quantize_block(weight)
    expected, expected_scale = quantize(weight, (128, 128))
    assert quantized.dtype == FP8
    assert quantized.shape == weight.shape
    assert tuple(scale.shape) == num_blocks(*shape)
    assert np.array_equal(scale.numpy(), expected_scale)
    assert np.array_equal(as_bytes(quantized), expected)


@pytest.mark.parametrize("block", [(64, 32), (1, 128), (3, 7)])
def test_blocks_of_other_sizes_equal_the_reference_too(block):
    weight = random_weight(70, 150)
    quantized, scale = quantize_block(weight, block)
    expected, expected_scale = quantize(weight, block)
    assert np.array_equal(scale.numpy(), expected_scale)
    assert np.array_equal(as_bytes(quantized), expected)


def test_work_in_panels_changes_nothing(monkeypatch):
    weight = random_weight(700, 300)
    whole = quantize_block(weight)
    values = dequantize_block(*whole)
    monkeypatch.setattr(block_fp8, "PANEL_ELEMENTS", 1)
    in_panels = quantize_block(weight)
    assert np.array_equal(as_bytes(whole[0]), as_bytes(in_panels[0]))
    assert torch.equal(whole[1], in_panels[1])
    assert torch.equal(dequantize_block(*whole), values)


def test_blocks_of_zeros_stay_zeros_and_have_a_scale():
    weight = torch.zeros(256, 256, dtype=torch.bfloat16)
    weight[:128, :128] = 3.0
    quantized, scale = quantize_block(weight)
    assert scale[0, 0] == np.float32(3) / np.float32(448)
    assert scale[1, 1] == np.float32(1e-10) / np.float32(448)
    assert as_bytes(quantized[:, 128:]).max() == 0
    assert torch.equal(dequantize_block(quantized, scale), weight)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_named_when_asked(bad):
    weight = torch.ones(200, 200, dtype=torch.bfloat16)
    weight[150, 7] = bad
    for function in (quantize_block, quantize_channel, quantize_tensor):
        with pytest.raises(DataError, match="model.layers.3.mlp.up_proj.weight has NaN or infinite"):
            function(weight, name="model.layers.3.mlp.up_proj.weight")
        _, scale = function(weight)  # without ue8m0 given, the scale's dtype decides
        assert not scale.isfinite().all()


def test_a_channel_has_one_scale_and_a_tensor_has_one():
    weight = random_weight(37, 91, torch.bfloat16)
    quantized, scale = quantize_channel(weight)
    expected, expected_scale = quantize(weight, (1, 91))
    assert scale.shape == (37, 1)
    assert np.array_equal(scale.numpy(), expected_scale)
    assert np.array_equal(as_bytes(quantized), expected)
    quantized, scale = quantize_tensor(weight)
    expected, expected_scale = quantize(weight, (37, 91))
    assert scale.shape == (1,)
    assert np.array_equal(scale.numpy(), expected_scale[0])
    assert np.array_equal(as_bytes(quantized), expected)


def test_dequantized_values_are_one_rounding_away():
    weight = torch.randn(130, 257, generator=torch.Generator().manual_seed(1))
    quantized, scale = quantize_block(weight)
    restored = dequantize_block(quantized, scale, dtype=torch.float32)
    blocks = scale.repeat_interleave(128, 0)[:130].repeat_interleave(128, 1)[:, :257]
    # Three bits of mantissa: half a step is 1/16 of the magnitude, or half of 2**-9 for subnormals.
    bound = torch.maximum(weight.abs() / 16, blocks * 2.0**-10)
    assert ((restored - weight).abs() <= bound * 1.0001).all()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_every_byte_is_decoded_as_torch_casts_it(dtype):
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).view(16, 16)
    decoded = dequantize_block(codes, torch.ones(1, 1), dtype=torch.float32)
    assert torch.equal(decoded.view(torch.int32), codes.float().view(torch.int32))
    assert torch.equal(dequantize_block(codes[:, ::2], torch.ones(1, 1)).isnan(), codes[:, ::2].float().isnan())


def test_weights_are_divided_by_the_rounded_scale():
    weight = torch.randn(200, 140, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    plain_scale = quantize_block(weight)[1]
    quantized, scale = quantize_block(weight, ue8m0=True)
    assert is_power_of_two(scale).all()
    assert (scale >= plain_scale).all()
    assert (scale < 2 * plain_scale).all()
    blocks = scale.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :140]
    assert np.array_equal(as_bytes(quantized), e4m3_bytes((weight.float() / blocks).numpy()))
    restored = dequantize_block(quantized, scale, dtype=torch.float32)
    assert ((restored - weight).abs() <= torch.maximum(weight.float().abs() / 16, blocks * 2.0**-10)).all()


def test_the_packed_layout_has_four_exponents_a_word_and_a_row_per_row():
    exponents = torch.tensor([[1, -2, 3, -4, 5], [10, 11, 12, 13, 14]])
    packed = transform_scale_ue8m0(torch.exp2(exponents.float()), mn=129)
    assert packed.shape == (129, 2)
    assert packed.dtype == torch.int32
    assert packed.stride() == (1, 132)  # columns start at multiples of 16 bytes
    unpacked = packed.contiguous().view(torch.uint8).view(129, 8).int() - 127
    assert unpacked[0].tolist() == [1, -2, 3, -4, 5, -127, -127, -127]
    assert unpacked[127].tolist() == unpacked[0].tolist()
    assert unpacked[128].tolist() == [10, 11, 12, 13, 14, -127, -127, -127]


def test_scales_that_have_no_exponent_form_are_refused():
    with pytest.raises(ValueError, match="ue8m0=True"):
        transform_scale_ue8m0(torch.tensor([[3.0]]), mn=100)
    with pytest.raises(ValueError, match="for 300 rows"):
        transform_scale_ue8m0(torch.ones(2, 2), mn=300)
