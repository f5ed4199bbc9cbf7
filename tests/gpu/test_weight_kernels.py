"""The compiled kernels of ``slime.ext.fast_push.kernels`` against the torch path of the same tables, byte for byte."""

from __future__ import annotations

import pytest
import torch

from slime.ext.fast_push.kernels.tables import CastItem, CastTable, CopyItem, CopyTable, DigestTable, as_unsigned
from slime.weights.digest import digest_bytes
from slime.weights.quantize.block_fp8 import quantize_block
from tests.ext.fast_push.kernels.table_cases import (
    COPY_BYTES,
    FLOATS,
    cast_items,
    check_joined_items,
    copy_items,
    filled,
)

pytestmark = [pytest.mark.gpu(1), pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


def assert_same_bytes(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert found.shape == wanted.shape
    wrong = (found != wanted).nonzero().flatten()
    assert not len(wrong), f"{len(wrong)} of {len(found)} bytes differ, the first at {wrong[:8].tolist()}"


@pytest.mark.parametrize("out_dtype", FLOATS)
def test_a_bucket_of_every_kind_equals_the_torch_path(out_dtype: torch.dtype) -> None:
    items = cast_items("cuda", 128, out_dtype)
    found = filled(items, out_dtype, 128, use_triton=True)
    assert_same_bytes(found, filled(items, out_dtype, 128, use_triton=False))
    on_cpu = [CastItem(i.source.cpu(), i.row_run, i.run_stride, i.rows, i.out_offset, i.kind, i.scale_offset)
              for i in items]  # fmt: skip
    assert_same_bytes(found.cpu(), filled(on_cpu, out_dtype, 128, use_triton=False))


@pytest.mark.parametrize("block", [16, 32, 64, 96])
def test_other_blocks_equal_the_torch_path(block: int) -> None:
    items = cast_items("cuda", block, torch.bfloat16, kinds=("fp8_block", "fp8_block_ue8m0"))
    wanted = filled(items, torch.bfloat16, block, use_triton=False)
    assert_same_bytes(filled(items, torch.bfloat16, block, use_triton=True), wanted)


def test_digests_of_segments_that_several_items_make_up() -> None:
    check_joined_items("cuda", use_triton=True)


def quantize_by_table(weight: torch.Tensor, kind: str = "fp8_block") -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = weight.shape
    scales = -(-rows // 128), -(-columns // 128)
    table = CastTable([CastItem(weight, rows, 0, rows, 0, kind, rows * columns)], torch.bfloat16)
    out = torch.empty(rows * columns + 4 * scales[0] * scales[1], dtype=torch.uint8, device="cuda")
    table.run(out)
    return out[: rows * columns].view(rows, columns), out[rows * columns :].view(torch.float32).view(scales)


@pytest.mark.parametrize("kind", ["fp8_block", "fp8_block_ue8m0"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_quotients_round_as_in_torch_for_every_element(dtype: torch.dtype, kind: str) -> None:
    """67 million elements per dtype: magnitudes over 40 octaves, and multiples of the scale on ties of e4m3."""
    generator = torch.Generator("cuda").manual_seed(5)

    def random(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator, device="cuda")

    size = 4096
    for tops in (torch.exp2(random(32, 1, 32, 1) * 12 - 6), torch.exp2(random(32, 1, 32, 1) * 60 - 40)):
        if dtype == torch.float16:
            tops = tops.clamp(1e-3, 6e4)
        codes = torch.arange(1, 127, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn).float()
        ties = (codes[1:] + codes[:-1]) / 2 / 448
        spread = torch.exp2(-40 * random(32, 128, 32, 128))
        near_ties = ties[(random(32, 128, 32, 128) * len(ties)).long()]
        weight = torch.where(random(32, 128, 32, 128) < 0.5, spread, near_ties) * tops
        weight[:, 5, :, 7] = tops[:, 0, :, 0]
        weight *= torch.where(random(32, 128, 32, 128) < 0.5, 1.0, -1.0)
        weight = weight.view(size, size).to(dtype)
        found, scale = quantize_by_table(weight, kind)
        wanted, wanted_scale = quantize_block(weight, ue8m0=kind == "fp8_block_ue8m0")
        assert scale.equal(wanted_scale)
        assert_same_bytes(found.flatten(), wanted.view(torch.uint8).flatten())


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_block_that_is_not_finite_stays_so_and_its_neighbours_are_untouched(dtype: torch.dtype) -> None:
    weight = torch.randn(256, 256, device="cuda", dtype=dtype)
    clean, _ = quantize_by_table(weight)
    for value in (float("nan"), float("inf"), float("-inf")):
        bad = weight.clone()
        bad[130, 3] = value
        found, scale = quantize_by_table(bad)
        assert not scale[1, 0].isfinite() and scale.isfinite().sum() == 3
        assert (found[130, 3] & 0x7F) == 0x7F, "e4m3's NaN"
        assert found[:128].equal(clean[:128]) and found[128:, 128:].equal(clean[128:, 128:])
        _, wanted = quantize_block(bad)
        assert scale.nan_to_num(nan=-1.0).equal(wanted.nan_to_num(nan=-1.0))


def test_a_table_reads_what_the_parameters_hold_at_each_run() -> None:
    weight = torch.randn(256, 384, device="cuda", dtype=torch.bfloat16)
    table = CastTable([CastItem(weight, 256, 0, 256, 0, "copy")], torch.bfloat16)
    out = torch.zeros(table.num_bytes, dtype=torch.uint8, device="cuda")
    for _ in range(2):
        weight.mul_(-2)
        table.run(out)
        assert out.view(torch.bfloat16).view(256, 384).equal(weight)


def test_a_stacked_parameter_of_more_than_two_to_the_31_elements() -> None:
    """Offsets of the last rows do not fit into 32 bits."""
    weight = torch.zeros(17 << 17, 1024, device="cuda", dtype=torch.bfloat16)
    weight[-128:] = torch.randn(128, 1024, device="cuda", dtype=torch.bfloat16)
    rows, columns = weight.shape
    table = CastTable([CastItem(weight, rows, 0, rows, 0, "fp8_block", rows * columns)], torch.bfloat16)
    out = torch.empty(table.num_bytes, dtype=torch.uint8, device="cuda")
    table.run(out)
    wanted, scale = quantize_block(weight[-128:])
    assert out[: rows * columns].view(rows, columns)[-128:].equal(wanted.view(torch.uint8))
    assert out[rows * columns :].view(torch.float32)[-8:].equal(scale.view(-1))
    held = torch.empty_like(weight)
    copy = CopyTable([CopyItem(held, 0, (columns, 1), torch.bfloat16)])
    flat = weight.view(-1).view(torch.uint8)
    copy.copy(flat)
    assert held[-128:].equal(weight[-128:]) and copy.count_differences(flat).item() == 0
    assert as_unsigned(DigestTable([0], [flat.numel()], "cuda").run(flat)) == [digest_bytes(flat)]


def test_copies_and_comparisons_equal_the_torch_path() -> None:
    flat = torch.zeros(COPY_BYTES, dtype=torch.uint8, device="cuda")
    items = copy_items("cuda", flat)
    fused, plain = CopyTable(items), CopyTable(items, use_triton=False)
    wanted = plain.count_differences(flat)
    assert wanted.sum() > 0 and fused.count_differences(flat).equal(wanted)
    fused.copy(flat)
    assert plain.count_differences(flat).sum() == 0
    assert fused.count_differences(flat).sum() == 0
    # Rounding to bf16 and fp16, which the CPU tests' interpreter does not do.
    values = torch.randn(300, 500, device="cuda") * 100
    for dtype in (torch.bfloat16, torch.float16):
        held = torch.zeros(300, 500, device="cuda", dtype=dtype)
        table = CopyTable([CopyItem(held, 0, (500, 1), torch.float32)])
        table.copy(values.view(-1).view(torch.uint8))
        assert held.equal(values.to(dtype))


def test_a_single_flipped_bit_is_counted_and_changes_the_digest() -> None:
    flat = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8, device="cuda")
    held = torch.zeros(1 << 19, dtype=torch.bfloat16, device="cuda")
    table = CopyTable([CopyItem(held[: 1 << 18], 0, (1,), torch.bfloat16),
                       CopyItem(held[1 << 18 :], 1 << 19, (1,), torch.bfloat16)])  # fmt: skip
    digests = DigestTable([0, 1 << 19], [1 << 19, 1 << 19], "cuda")
    table.copy(flat)
    before = as_unsigned(digests.run(flat))
    assert table.count_differences(flat).tolist() == [0, 0]
    flat[(1 << 19) + 77] ^= 4
    assert table.count_differences(flat).tolist() == [0, 1]
    after = as_unsigned(digests.run(flat))
    assert after[0] == before[0] and after[1] != before[1]


def test_digests_equal_the_definition() -> None:
    flat = torch.randint(0, 256, (5_000_000,), dtype=torch.uint8, device="cuda")
    for offsets, lengths in (
        ([0, 256, 1024, 70_400, 4_000_000], [7, 700, 69_000, 3_929_597, 999_999]),
        ([8, 1000, 40_000], [0, 32_768, 65_536 + 15]),
        ([], []),
    ):
        wanted = [digest_bytes(flat[begin : begin + size].cpu()) for begin, size in zip(offsets, lengths)]
        assert as_unsigned(DigestTable(offsets, lengths, "cuda").run(flat)) == wanted


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_bucket_in_the_memory_of_another_gpu_is_loaded_through_a_buffer_of_this_one() -> None:
    """As in the receiver: torch's copies reach another GPU's memory, kernels of this one do not."""
    flat = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8, device="cuda:1")
    held = torch.zeros(1 << 19, dtype=torch.bfloat16, device="cuda:0")
    table = CopyTable([CopyItem(held, 0, (1,), torch.bfloat16)])
    own = torch.empty_like(flat, device="cuda:0")
    for begin, end in ((0, 1 << 18), (1 << 18, 1 << 20)):
        own[begin:end].copy_(flat[begin:end], non_blocking=True)
    table.copy(own)
    assert table.count_differences(own).item() == 0
    assert held.view(torch.uint8).cpu().equal(flat.cpu())
