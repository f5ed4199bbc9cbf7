"""The tables of a bucket in plain torch: what each writes, compares or digests, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from slime.ext.fast_push.kernels.tables import CastItem, CastTable, CopyItem, CopyTable, DigestTable, as_unsigned
from slime.weights.digest import digest_bytes
from slime.weights.quantize.block_fp8 import quantize_block
from tests.ext.fast_push.kernels.table_cases import COPY_BYTES, cast_items, check_joined_items, copy_items


def run(*items: CastItem, out_dtype: torch.dtype = torch.bfloat16, block: tuple[int, int] = (128, 128)):
    table = CastTable(items, out_dtype, block)
    out = torch.full((table.num_bytes + 3,), 0xA5, dtype=torch.uint8)
    table.run(out)
    return out


def test_interleaved_rows_come_out_one_behind_the_other():
    # Two groups of (q0, q1, k, v), one row each.
    qkv = torch.arange(16, dtype=torch.float32).view(8, 2)
    q = CastItem(qkv, 2, 4, 4, 0, "copy")
    k = CastItem(qkv[2:], 1, 4, 2, 32, "copy")
    v = CastItem(qkv[3:], 1, 4, 2, 48, "copy")
    out = run(q, k, v)[:64].view(torch.float32).view(8, 2)
    assert out[:, 0].tolist() == [0, 2, 8, 10, 4, 12, 6, 14]
    assert out[:, 1].tolist() == [1, 3, 9, 11, 5, 13, 7, 15]


def test_copies_keep_bits_and_casts_round_to_nearest_even():
    source = torch.tensor([[1.0, 1.00390625, 1.01171875, float("nan")]])  # 1 + 2**-8 and 1 + 3 * 2**-8: ties
    out = run(CastItem(source, 1, 0, 1, 0, "cast"), CastItem(source, 1, 0, 1, 16, "copy"))
    assert out[:6].view(torch.bfloat16).tolist() == [1.0, 1.0, 1.015625]
    assert out[16:32].equal(source.view(torch.uint8).view(-1))


@pytest.mark.parametrize("kind", ["fp8_block", "fp8_block_ue8m0"])
def test_fp8_is_that_of_the_quantizer(kind: str):
    weight = torch.randn(200, 130).bfloat16()
    out = run(CastItem(weight, 200, 0, 200, 256, kind, 256 + 26_112))
    quantized, scale = quantize_block(weight, ue8m0=kind == "fp8_block_ue8m0")
    assert out[256 : 256 + 26_000].equal(quantized.view(torch.uint8).view(-1))
    assert out[256 + 26_112 :][:16].view(torch.float32).equal(scale.view(-1))


def test_digests_are_those_of_every_matrix_and_of_its_scales():
    items = cast_items("cpu", 16, torch.float16)
    table = CastTable(items, torch.float16, (16, 16))
    out = torch.zeros(table.num_bytes, dtype=torch.uint8)
    digests = as_unsigned(table.run_with_digests(out))
    assert len(digests) == len(items) + sum(item.is_fp8 for item in items)
    assert digests == [digest_bytes(out[offset : offset + size]) for offset, size in table.segments]
    assert table.segments[:2] == [(items[0].out_offset, 512), (items[0].scale_offset, 8)]


def test_digests_of_segments_that_several_items_make_up():
    check_joined_items("cpu", use_triton=False)


def test_a_run_reads_what_the_parameter_holds_then():
    weight = torch.nn.Parameter(torch.ones(2, 2))
    table = CastTable([CastItem(weight, 2, 0, 2, 0, "copy")], torch.bfloat16)
    out = torch.zeros(16, dtype=torch.uint8)
    with torch.no_grad():
        weight.fill_(7.0)
    table.run(out)
    assert out.view(torch.float32).tolist() == [7.0] * 4


SOURCE = torch.zeros(4, 8)


def test_a_bucket_that_is_too_small_is_refused():
    table = CastTable([CastItem(SOURCE, 4, 0, 4, 0, "copy")], torch.bfloat16)
    with pytest.raises(ValueError, match="the bucket has 127 bytes; this table needs 128"):
        table.run(torch.zeros(127, dtype=torch.uint8))
    with pytest.raises(ValueError, match="flat uint8"):
        table.run(torch.zeros(128))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def test_slices_of_a_bucket_land_in_a_fused_parameter():
    up, gate = torch.arange(12.0).view(3, 4), 100 + torch.arange(12.0).view(3, 4)
    flat = torch.cat([as_bytes(gate), as_bytes(up)])
    fused = torch.zeros(4, 4)
    # The second of three tensor-parallel parts has the middle row of each; the last has only columns 1 and 2.
    items = [
        CopyItem(fused[0], 16, (1,), torch.float32),
        CopyItem(fused[1], 48 + 16, (1,), torch.float32),
        CopyItem(fused[2:4, 1:3], 48 + 4, (4, 1), torch.float32),
    ]
    CopyTable(items).copy(flat)
    assert fused.tolist() == [[104, 105, 106, 107], [4, 5, 6, 7], [0, 1, 2, 0], [0, 5, 6, 0]]


def test_every_case_equals_what_it_was_copied_from():
    flat = torch.zeros(COPY_BYTES, dtype=torch.uint8)
    items = copy_items("cpu", flat)
    table = CopyTable(items)
    before = table.count_differences(flat)
    table.copy(flat)
    assert before.sum() > 1000 and table.count_differences(flat).sum() == 0


def test_differences_are_bytes_after_the_cast():
    flat = as_bytes(torch.tensor([1.0, 2.0, 3.0]))
    held = torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16)
    table = CopyTable([CopyItem(held, 0, (1,), torch.float32), CopyItem(torch.zeros(2), 0, (1,), torch.float32)])
    # 1.0 is 3f800000, 2.0 is 40000000.
    assert table.count_differences(flat).tolist() == [0, 3]
    held.view(torch.uint8)[3] ^= 0x80
    assert table.count_differences(flat).tolist() == [1, 3]


def test_equal_numbers_with_other_bits_differ():
    flat = as_bytes(torch.tensor([0.0, float("nan")]))
    held = torch.tensor([-0.0, float("nan")])
    assert CopyTable([CopyItem(held, 0, (1,), torch.float32)]).count_differences(flat).tolist() == [1]


DATA = torch.randint(0, 256, (4096,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def test_segments_have_the_digests_of_their_bytes():
    offsets, lengths = [0, 256, 1000, 4096], [256, 3, 3096, 0]
    wanted = [digest_bytes(DATA[begin : begin + size]) for begin, size in zip(offsets, lengths)]
    assert as_unsigned(DigestTable(offsets, lengths, "cpu").run(DATA)) == wanted
    assert max(wanted) >= 1 << 63, "the case has a value that int64 wraps"
