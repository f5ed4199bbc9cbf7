"""Packed rotary embedding: positions by hand, values against megatron-core, gradients by autograd."""

from __future__ import annotations

import pytest
import torch
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_thd
from megatron.core.packed_seq_params import PackedSeqParams

from slime.backends.megatron_utils.layers.rotary import apply_rotary, packed_positions, rotary_tables
from slime.train_data.context_parallel import CPRank


class Group:
    """A process group with what megatron-core uses here."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


@pytest.mark.parametrize(("rank", "expected"), [(0, [0, 1, 6, 7, 0, 3]), (1, [2, 3, 4, 5, 1, 2])])
def test_a_context_parallel_rank_has_the_positions_of_its_two_chunks(rank: int, expected: list[int]) -> None:
    cu_seqlens = torch.tensor([0, 8, 12], dtype=torch.int32)
    assert packed_positions(cu_seqlens, 6, CPRank(rank, 2)).tolist() == expected


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotated", [8, 4])
@pytest.mark.parametrize(("rank", "size"), [(0, 1), (0, 2), (1, 2)])
def test_the_result_is_that_of_megatron_core(interleaved: bool, rotated: int, rank: int, size: int) -> None:
    torch.manual_seed(0)
    lengths = [4, 12, 8]
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    half = torch.outer(torch.arange(12.0), torch.rand(rotated // 2) + 0.1)
    pairs = torch.stack([half, half], -1).flatten(1) if interleaved else torch.cat([half, half], -1)
    freqs = pairs[:, None, None]
    x = torch.randn(24 // size, 3, 8)
    expected = _apply_rotary_pos_emb_thd(
        x, cu_seqlens, freqs, rotary_interleaved=interleaved, mscale=1.3, cp_group=Group(rank, size)
    )
    params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens)
    tables = rotary_tables(params, freqs, 24 // size, CPRank(rank, size), interleaved=interleaved, mscale=1.3)
    torch.testing.assert_close(apply_rotary(x, tables, interleaved=interleaved), expected, atol=1e-6, rtol=0)
    again = rotary_tables(params, freqs, 24 // size, CPRank(rank, size), interleaved=interleaved)
    assert again is tables  # later layers reuse the first layer's tables


def test_the_gradient_is_the_inverse_rotation() -> None:
    angles = torch.rand(5, 2, dtype=torch.float64)
    from slime.backends.megatron_utils.layers.rotary import RotaryTables

    tables = RotaryTables(angles.cos(), angles.sin())
    x = torch.randn(5, 2, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda y: apply_rotary(y, tables, interleaved=True), (x,))
    back = RotaryTables(angles.cos(), -angles.sin())
    turned = apply_rotary(x, tables, interleaved=False)
    torch.testing.assert_close(apply_rotary(turned, back, interleaved=False), x)
