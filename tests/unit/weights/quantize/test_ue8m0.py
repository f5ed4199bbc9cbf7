"""Scales that are powers of two, and their packed layout."""

import numpy as np
import pytest
import torch

from slime.weights.quantize.block_fp8 import dequantize_block, quantize_block
from slime.weights.quantize.ue8m0 import is_power_of_two, round_up_to_power_of_two, transform_scale_ue8m0
from tests.unit.weights.quantize.fp8_reference import as_bytes, e4m3_bytes


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
