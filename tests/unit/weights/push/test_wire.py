"""Sending tensors to an engine, by value and by handle."""

from __future__ import annotations

import base64
import pickle

import pytest
import torch

from slime.weights.push.wire import by_value


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.float8_e4m3fn, torch.float8_e5m2])
def test_what_travels_by_value_comes_back_in_its_dtype_and_shape(dtype: torch.dtype) -> None:
    tensor = torch.randn(6, 4).to(dtype)[:, 1:3]
    ((name, back),) = pickle.loads(base64.b64decode(by_value([("x", tensor)])))
    assert (name, back.dtype, back.shape) == ("x", dtype, tensor.shape)
    assert torch.equal(back.float(), tensor.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_views_of_one_buffer_travel_once_each_not_the_buffer_for_each(dtype: torch.dtype) -> None:
    views = [(str(index), row) for index, row in enumerate(torch.randn(64, 1024).to(dtype))]
    assert len(by_value(views)) < 2 * 64 * 1024 * dtype.itemsize
