"""Tensors by name on their way: what torch's pickles cannot carry."""

from __future__ import annotations

import torch

from slime.weights.named_tensors import with_small_floats, without_small_floats


def test_one_byte_floats_travel_as_bytes_and_come_back():
    quantized = torch.tensor([[1.0, -2.5], [448.0, 0.0]]).to(torch.float8_e4m3fn)
    sent = [("a.weight", quantized), ("a.weight_scale_inv", torch.ones(1)), ("ids", torch.zeros(2, dtype=torch.uint8))]
    wire = without_small_floats(sent)
    assert not any(tensor.is_floating_point() and tensor.element_size() == 1 for _, tensor in wire)
    back = with_small_floats(wire)
    assert [(name, tensor.dtype) for name, tensor in back] == [(name, tensor.dtype) for name, tensor in sent]
    assert back[0][1].view(torch.uint8).equal(quantized.view(torch.uint8))
