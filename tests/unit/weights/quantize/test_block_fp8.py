"""FP8 by block, row and matrix, and scales that are powers of two, against the format's table of numbers."""

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
    round_up_to_power_of_two,
    transform_scale_ue8m0,
)
from tests.unit.weights.quantize.fp8_reference import POSITIVE, as_bytes, e4m3_bytes, e4m3_value, quantize

SHAPES = ((256, 384), (1, 1), (130, 257), (127, 128), (5, 300), (300, 5))


def random_weight(rows, columns, dtype=torch.float32, seed=0):
    """Magnitudes over many powers of two, so that blocks have subnormal results too."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator)
    return (weight * torch.exp2(torch.randint(-18, 3, (rows, columns), generator=generator))).to(dtype)


def test_the_reference_knows_the_format():
    assert [e4m3_value(byte) for byte in (0x00, 0x01, 0x08, 0x38, 0x7E, 0xB8)] == [0, 2**-9, 2**-6, 1, 448, -1]
    assert len(POSITIVE) == 127
    # 17 lies between 16 and 18, 19 between 18 and 20: both ties go to the even byte.
    assert POSITIVE[e4m3_bytes(np.array([17.0, 19.0]))].tolist() == [16.0, 20.0]


def test_torch_casts_as_the_format_says():
    bits = torch.arange(0, 1 << 16, dtype=torch.int32).to(torch.int16)
    values = bits.view(torch.bfloat16).float()
    values = values[values.abs() <= 448]
    assert np.array_equal(as_bytes(values.to(FP8)), e4m3_bytes(values.numpy()))


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


def test_a_view_gives_what_its_copy_gives():
    weight = random_weight(300, 260).T
    quantized, scale = quantize_block(weight)
    expected, expected_scale = quantize_block(weight.contiguous())
    assert quantized.is_contiguous()
    assert np.array_equal(as_bytes(quantized), as_bytes(expected))
    assert torch.equal(scale, expected_scale)


def test_blocks_of_zeros_stay_zeros_and_have_a_scale():
    weight = torch.zeros(256, 256, dtype=torch.bfloat16)
    weight[:128, :128] = 3.0
    quantized, scale = quantize_block(weight)
    assert scale[0, 0] == np.float32(3) / np.float32(448)
    assert scale[1, 1] == np.float32(1e-10) / np.float32(448)
    assert as_bytes(quantized[:, 128:]).max() == 0
    assert torch.equal(dequantize_block(quantized, scale), weight)


def test_the_largest_of_a_block_is_448_and_nothing_is_lost_at_the_top():
    weight = random_weight(128, 128)
    quantized, scale = quantize_block(weight)
    assert quantized.float().abs().max() == 448
    assert not quantized.float().isnan().any()


def test_matrices_without_elements_have_no_blocks():
    quantized, scale = quantize_block(torch.zeros(0, 256))
    assert quantized.shape == (0, 256)
    assert scale.shape == (0, 2)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_named_when_asked(bad):
    weight = torch.ones(200, 200, dtype=torch.bfloat16)
    weight[150, 7] = bad
    for function in (quantize_block, quantize_channel, quantize_tensor):
        with pytest.raises(DataError, match="model.layers.3.mlp.up_proj.weight has NaN or infinite"):
            function(weight, name="model.layers.3.mlp.up_proj.weight")
        _, scale = function(weight)  # unasked, the scale says so
        assert not scale.isfinite().all()


def test_what_is_no_floating_point_matrix_is_refused():
    with pytest.raises(ValueError, match=r"shape \[4\]"):
        quantize_block(torch.zeros(4))
    with pytest.raises(ValueError, match="torch.int32"):
        quantize_block(torch.zeros(4, 4, dtype=torch.int32))
    with pytest.raises(ValueError, match="float8"):
        quantize_tensor(torch.zeros(4, 4).to(FP8))
    with pytest.raises(ValueError, match="must be positive"):
        quantize_block(torch.zeros(4, 4), (0, 128))


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


def test_each_block_is_multiplied_by_its_own_scale():
    scale = torch.tensor([[1.0, 10.0], [100.0, 1000.0]])
    result = dequantize_block(torch.ones(3, 3).to(FP8), scale, (2, 2))
    assert result.tolist() == [[1, 1, 10], [1, 1, 10], [100, 100, 1000]]


def test_scales_that_do_not_fit_are_refused():
    quantized, scale = quantize_block(torch.ones(256, 256))
    with pytest.raises(DataError, match="weight_block_size"):
        dequantize_block(quantized, scale[:1])


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_every_byte_is_decoded_as_torch_casts_it(dtype):
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).view(16, 16)
    decoded = dequantize_block(codes, torch.ones(1, 1), dtype=torch.float32)
    assert torch.equal(decoded.view(torch.int32), codes.float().view(torch.int32))
    assert torch.equal(dequantize_block(codes[:, ::2], torch.ones(1, 1)).isnan(), codes[:, ::2].float().isnan())


def test_scales_are_rounded_up_to_powers_of_two():
    scale = torch.tensor([1.0, 1.0000001, 0.75, 2.0**-40, 3.0, 2.2e-13, float("inf")])
    assert round_up_to_power_of_two(scale).tolist() == [1, 2, 1, 2.0**-40, 4, 2.0**-42, float("inf")]
    assert round_up_to_power_of_two(torch.tensor([float("nan")])).isnan().all()


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
