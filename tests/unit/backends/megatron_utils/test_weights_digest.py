"""The weights digest recorded for every rollout changes with any bit, wherever it is."""

from __future__ import annotations

import pytest
import torch

from slime.backends.megatron_utils.parameters import _column_sums, _joined


def sums_of(*weights: torch.Tensor, max_bytes: int = 2**26) -> torch.Tensor:
    return torch.stack([_column_sums(part) for part in _joined(weights, max_bytes)])


@pytest.mark.parametrize("size", [1, 3, 7, 250, 4096, 256 * 251 * 4 + 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_bit_and_every_place_counts(size, dtype):
    generator = torch.Generator().manual_seed(size)
    weight = torch.randn(size, generator=generator).to(dtype)
    sums = sums_of(weight)
    assert torch.equal(sums_of(weight.clone()), sums)
    for place in {0, size // 2, size - 1}:
        changed = weight.clone()
        changed.view(torch.uint8)[place * weight.element_size()] ^= 1
        assert not torch.equal(sums_of(changed), sums)
    if size > 1:
        swapped = weight.clone()
        swapped[0], swapped[-1] = weight[-1], weight[0]
        assert not torch.equal(sums_of(swapped), sums)


@pytest.mark.parametrize("max_bytes", [1, 100, 2**26])
def test_every_weight_counts_however_they_are_joined(max_bytes):
    weights = [torch.randn(3, 5), torch.randn(7).bfloat16(), torch.randn(1), torch.randn(64)]
    sums = sums_of(*weights, max_bytes=max_bytes)
    assert len(sums) == {1: 4, 100: 2, 2**26: 1}[max_bytes]
    for weight in weights:
        weight.view(-1).view(torch.uint8)[-1] ^= 1
        assert not torch.equal(sums_of(*weights, max_bytes=max_bytes), sums)
        weight.view(-1).view(torch.uint8)[-1] ^= 1
    assert torch.equal(sums_of(*weights, max_bytes=max_bytes), sums)
