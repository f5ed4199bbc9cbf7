"""Rounding to int4 in the forward pass: the quantizer's values bit for bit, and a straight-through gradient."""

from __future__ import annotations

import pytest
import torch

from slime.ext.low_precision.rounding import fake_quantize_int4, rounded_to_int4
from slime.weights.quantize.formats import GroupInt
from slime.weights.quantize.group_int import unpack

NAME = "model.layers.0.mlp.experts.0.up_proj.weight"


def test_a_group_by_hand() -> None:
    """The largest magnitude, 3.5, makes the scale 0.5; quotients are rounded to nearest, halves to even."""
    weight = torch.tensor([[3.5, -3.5, 0.25, 0.75, 0.2, -0.26, 0.0, 1.3]])
    expected = torch.tensor([[3.5, -3.5, 0.0, 1.0, 0.0, -0.5, 0.0, 1.5]])
    assert torch.equal(rounded_to_int4(weight, 8), expected)


@pytest.mark.parametrize("group_size", [32, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_values_are_those_that_a_push_of_the_weight_stands_for(dtype: torch.dtype, group_size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(3, 24, 256, generator=generator) * torch.exp2(torch.randint(-20, 3, (3, 24, 1)).float())
    weight[0, :4, :64] = 0
    weight = weight.to(dtype)
    rounded = rounded_to_int4(weight, group_size)
    assert (rounded.shape, rounded.dtype) == (weight.shape, dtype)
    how = GroupInt(4, group_size, True, dtype)
    for expert, found in zip(weight, rounded, strict=True):
        parts = how.quantize(NAME, expert, check_finite=True)
        codes = unpack(parts["weight_packed"], 4, 256).float() - 8
        scale = parts["weight_scale"].float().repeat_interleave(group_size, dim=1)
        assert torch.equal(found, (codes * scale).to(dtype))
        if dtype == torch.bfloat16:
            assert torch.equal(found, how.dequantize(NAME, parts))


def test_the_gradient_is_that_of_the_rounded_weight() -> None:
    weight = torch.randn(4, 64, requires_grad=True)
    upstream = torch.randn(4, 64)
    fake_quantize_int4(weight, 32).backward(upstream)
    assert weight.grad is not None
    assert torch.equal(weight.grad, upstream)


def test_rows_that_are_no_whole_number_of_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="rows of 48 columns are no whole number of groups of 32"):
        fake_quantize_int4(torch.zeros(2, 48), 32)
