"""Integers with a scale per group, against plain Python, and their packing into words."""

import math

import numpy as np
import pytest
import torch

from slime.utils.errors import ConfigError, DataError
from slime.weights.quantize.formats import GroupInt
from slime.weights.quantize.group_int import dequantize_group, num_words, pack, quantize_group, unpack


def random_weight(rows, columns, dtype=torch.bfloat16, seed=0):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).to(dtype)


def half_even(value):
    """Python's own round."""
    return round(float(value))


def plain_symmetric(weight, num_bits, group, scale_dtype):
    """Element by element, from the formula."""
    top = (1 << (num_bits - 1)) - 1
    matrix = weight.float().numpy()
    quantized = np.zeros(matrix.shape, dtype=int)
    scales = np.zeros((matrix.shape[0], matrix.shape[1] // group), dtype=np.float32)
    for row in range(matrix.shape[0]):
        for index in range(scales.shape[1]):
            part = matrix[row, index * group : (index + 1) * group]
            scale = max(np.float32(max(abs(x) for x in part)) / np.float32(top), np.float32(1e-5))
            scale = np.float32(torch.tensor(scale).to(scale_dtype).float())
            scales[row, index] = scale
            for column, value in enumerate(part):
                number = min(max(half_even(value / scale), -top - 1), top)
                quantized[row, index * group + column] = number + top + 1
    return quantized, scales


@pytest.mark.parametrize(("num_bits", "scale_dtype"), [(4, torch.bfloat16), (4, torch.float32), (8, torch.float16)])
def test_symmetric_groups_equal_the_formula(num_bits, scale_dtype):
    weight = random_weight(5, 96)
    weight[2, 32:64] = 0
    quantized, scale, zeros = quantize_group(
        weight, num_bits=num_bits, groups=3, is_symmetric=True, scale_dtype=scale_dtype
    )
    expected, scales = plain_symmetric(weight, num_bits, 32, scale_dtype)
    assert zeros is None
    assert scale.dtype == scale_dtype
    assert np.array_equal(quantized.numpy(), expected)
    assert np.array_equal(scale.float().numpy(), scales)
    assert dequantize_group(quantized, scale, None, num_bits=num_bits)[2, 32:64].abs().max() == 0


def test_asymmetric_groups_use_the_whole_range_and_keep_zero():
    weight = random_weight(3, 64) + 1.5
    weight[1] = 0
    quantized, scale, zeros = quantize_group(weight, num_bits=4, groups=2, is_symmetric=False)
    for row in range(3):
        for index in range(2):
            part = weight[row, index * 32 : (index + 1) * 32].float()
            low, high = min(float(part.min()), 0.0), max(float(part.max()), 0.0)
            step = float(torch.tensor(max((high - low) / 15, 1e-5)).to(torch.bfloat16))
            assert math.isclose(float(scale[row, index]), step)
            assert int(zeros[row, index]) == half_even(-low / step)
    restored = dequantize_group(quantized, scale, zeros, num_bits=4, dtype=torch.float32)
    steps = scale.float().repeat_interleave(32, 1)
    assert ((restored - weight).abs() <= steps * 1.01).all()
    assert restored[1].abs().max() == 0


def test_the_first_of_eight_lies_in_the_lowest_bits():
    values = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 15, 9]], dtype=torch.uint8)
    words = pack(values, 4)
    assert words.dtype == torch.int32
    assert [hex(int(word) & 0xFFFFFFFF) for word in words[0]] == ["0xf7654321", "0x9"]
    assert unpack(words, 4, 9).tolist() == values.tolist()
    assert hex(int(pack(values[:, :4], 8)[0, 0])) == "0x4030201"
    assert num_words(9, 4) == 2


def test_awq_order_is_what_awq_readers_undo():
    values = torch.arange(8, dtype=torch.uint8)[None]
    words = pack(values, 4, (0, 4, 1, 5, 2, 6, 3, 7))
    assert hex(int(words[0, 0]) & 0xFFFFFFFF) == "0x75316420"  # neighbours 0, 2, 4, 6 low, 1, 3, 5, 7 high
    assert unpack(words, 4, 8, (0, 4, 1, 5, 2, 6, 3, 7)).tolist() == values.tolist()


@pytest.mark.parametrize(
    "name", ["model.layers.0.mlp.down_proj.weight", "model.layers.0.mlp.experts.3.up_proj.weight"]
)
@pytest.mark.parametrize("weight_format", [
    GroupInt(4, 32, True), GroupInt(4, 32, False), GroupInt(8, 32, True), GroupInt(8, None, False),
    GroupInt(4, None, True, torch.float32),
])  # fmt: skip
def test_what_is_packed_is_read_back_as_it_was_quantized(weight_format, name):
    weight = random_weight(20, 96)
    parts = weight_format.quantize(name, weight, check_finite=True)
    assert {part: (tuple(t.shape), t.dtype) for part, t in parts.items()} == weight_format.outputs(name, (20, 96))
    assert parts["weight_shape"].tolist() == [20, 96]
    groups = 1 if weight_format.group_size is None else 3
    expected = dequantize_group(
        *quantize_group(
            weight,
            num_bits=weight_format.num_bits,
            groups=groups,
            is_symmetric=weight_format.is_symmetric,
            scale_dtype=weight_format.scale_dtype,
        ),
        num_bits=weight_format.num_bits,
    )
    restored = weight_format.dequantize(name, parts)
    assert restored.dtype == torch.bfloat16
    assert torch.equal(restored, expected)
    assert (restored - weight).abs().max() < (0.6 if weight_format.num_bits == 4 else 0.05)


def test_a_group_that_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match="x.weight has 100 columns.*group size 32"):
        GroupInt(4, 32, True).outputs("x.weight", (8, 100))
    with pytest.raises(ConfigError, match="--group-size"):
        GroupInt(4, 32, True).quantize("x.weight", torch.zeros(8, 100), check_finite=False)


def test_weights_that_are_not_finite_are_named_when_asked():
    weight = torch.ones(4, 32)
    weight[1, 3] = float("nan")
    with pytest.raises(DataError, match="x.weight has NaN"):
        GroupInt(4, 32, True).quantize("x.weight", weight, check_finite=True)
