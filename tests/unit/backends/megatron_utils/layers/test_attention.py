"""Packed causal attention against the textbook formula, in one process and in the chunks of several ranks."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from slime.backends.megatron_utils.flags.config_builders import transformer_config_from_args
from slime.backends.megatron_utils.layers import attention, attention_kernels
from slime.backends.megatron_utils.layers.attention import (
    PackedAttention,
    per_sequence_attention,
    varlen_attention,
    zigzag_attention,
)
from slime.train_data.context_parallel import CPRank
from slime.utils.errors import ConfigError
from tests.unit.backends.megatron_utils.megatron_case import parse, start_single_process

DENSE = "--num-layers 1 --hidden-size 16 --num-attention-heads 4 --kv-channels 4 --vocab-size 8".split()


def textbook_attention(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None = None) -> Tensor:
    """[l, heads, d]: softmax in fp64 over the keys up to the query's position; queries are the last positions.

    With a window, over the last ``window`` keys only.
    """
    repeats = query.size(1) // key.size(1)
    q, k, v = (x.double() for x in (query, key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    hidden = torch.ones(q.size(0), k.size(0), dtype=torch.bool).triu(k.size(0) - q.size(0) + 1)
    if window is not None:
        hidden |= torch.ones_like(hidden).tril(k.size(0) - q.size(0) - window)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -math.inf).softmax(-1), v)


def random_qkv(length: int, *, heads: int = 4, groups: int = 2, width: int = 6, value_width: int = 6) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length)
    sizes = ((heads, width), (groups, width), (groups, value_width))
    return [torch.randn(length, *size, generator=generator) for size in sizes]


def cumulative(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def check_zigzag(
    monkeypatch: pytest.MonkeyPatch, attend: Any, qkv: list[Tensor], lengths: list[int], cp_size: int, expected: Tensor
) -> None:
    """Check that every rank has the rows of ``expected`` of its two chunks of each sequence."""

    def local(x: Tensor, rank: int) -> Tensor:
        pieces = []
        for sequence in x.split(lengths):
            chunks = sequence.chunk(2 * cp_size)
            pieces += [chunks[rank], chunks[2 * cp_size - 1 - rank]]
        return torch.cat(pieces)

    # The result of a gather over the group: the slices of all ranks in order; keys, then values.
    gathered = [torch.cat([local(x, rank) for rank in range(cp_size)]) for x in qkv[1:]]
    for rank in range(cp_size):
        answers = iter(gathered)
        monkeypatch.setattr(
            attention, "gather_from_sequence_parallel_region", lambda x, group, answers=answers: next(answers)
        )
        parts = [local(x, rank) for x in qkv]
        out = zigzag_attention(attend, *parts, cumulative(lengths), max(lengths), None, CPRank(rank, cp_size))
        torch.testing.assert_close(out.double(), local(expected, rank), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("cp_size", [2, 3])
def test_zigzag_ranks_together_give_the_attention_of_whole_sequences(
    monkeypatch: pytest.MonkeyPatch, cp_size: int
) -> None:
    lengths = [2 * cp_size * chunk for chunk in (1, 3, 0, 2)]  # the empty one is padding of length zero
    qkv = random_qkv(sum(lengths))

    def attend(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int) -> Tensor:
        lengths_q, lengths_k = cu_q.diff().tolist(), cu_k.diff().tolist()
        assert (max_q, max_k) == (max(lengths_q), max(lengths_k))
        return per_sequence_attention(q, k, v, lengths_q, lengths_k, scale=0.5)

    whole = [textbook_attention(*parts, 0.5) for parts in zip(*(x.split(lengths) for x in qkv), strict=True)]
    check_zigzag(monkeypatch, attend, qkv, lengths, cp_size, torch.cat(whole))


@pytest.mark.parametrize("cp_size", [1, 2])
@pytest.mark.parametrize("window", [1, 3, 8, 100])
def test_a_window_hides_all_but_the_last_keys_whoever_holds_them(
    monkeypatch: pytest.MonkeyPatch, window: int, cp_size: int
) -> None:
    lengths = [8, 4, 16]
    qkv = random_qkv(sum(lengths))
    parts = zip(*(x.split(lengths) for x in qkv), strict=True)
    expected = torch.cat([textbook_attention(*part, 0.5, window) for part in parts])

    def attend(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, *_: int) -> Tensor:
        return per_sequence_attention(q, k, v, cu_q.diff().tolist(), cu_k.diff().tolist(), scale=0.5, window=window)

    if cp_size == 1:
        cu = cumulative(lengths)
        assert torch.allclose(attend(*qkv, cu, cu).double(), expected, atol=1e-6)
    else:
        check_zigzag(monkeypatch, attend, qkv, lengths, cp_size, expected)


def test_a_layer_has_a_window_where_the_flags_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    args = parse(*DENSE, "--window-size", "7,0", "--window-attn-skip-freq", "3")
    start_single_process(args)
    config = transformer_config_from_args(args)
    assert [PackedAttention(config, layer_number=number).window for number in range(1, 7)] == [8, 8, None] * 2
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(
        attention_kernels,
        "_torch_varlen",
        lambda: (lambda q, *_, window_size, **__: seen.append(window_size) or q, True),
    )
    cu = cumulative([4])
    varlen_attention(*random_qkv(4, groups=4), cu, cu, 4, 4, scale=1.0, window=8)
    assert seen == [(7, 0)]


@pytest.mark.parametrize("knows_gqa", [True, False], ids=["torch-2.13", "torch-2.11"])
@pytest.mark.parametrize(("width", "value_width"), [(6, 4), (4, 6), (6, 6)])
def test_the_flash_kernel_is_called_with_equal_widths_and_a_causal_window(
    monkeypatch: pytest.MonkeyPatch, knows_gqa: bool, width: int, value_width: int
) -> None:
    seen: dict[str, object] = {}

    def kernel(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, **options: object):  # noqa: ANN202
        seen.update(options)
        assert q.size(-1) == k.size(-1) == v.size(-1) == max(width, value_width)
        return per_sequence_attention(q, k, v, cu_q.diff().tolist(), cu_k.diff().tolist(), scale=options["scale"])

    monkeypatch.setattr(attention_kernels, "_torch_varlen", lambda: (kernel, knows_gqa))
    query, key, value = random_qkv(5, width=width, value_width=value_width)
    cu = cumulative([2, 3])
    out = varlen_attention(query, key, value, cu, cu, 3, 3, scale=0.5)
    assert torch.allclose(out, per_sequence_attention(query, key, value, [2, 3], [2, 3], scale=0.5), atol=1e-6)
    assert seen["window_size"] == (-1, 0)
    assert ("enable_gqa" in seen) == knows_gqa


SHAPE = attention_kernels.HeadShape(4, 2, 8, 6, torch.bfloat16, None)


@pytest.mark.parametrize(
    ("error", "new_ms", "chosen"),
    [
        (2e-3, 1.0, "flash_attn_4"),
        (2e-3, 3.0, "torch_flash"),
        (9e-3, 1.0, "torch_flash"),
        (math.nan, 1.0, "torch_flash"),
    ],
    ids=["faster", "slower", "wrong", "nan"],
)
def test_flash_attn_4_runs_where_it_is_right_and_faster(
    monkeypatch: pytest.MonkeyPatch, error: float, new_ms: float, chosen: str
) -> None:
    monkeypatch.setattr(attention_kernels, "_has_flash_attn_4", lambda: True)
    monkeypatch.setattr(attention_kernels, "kernel_error", lambda *_: error)
    times = {attention_kernels.flash_attn_4: new_ms, attention_kernels.torch_flash: 2.0}
    monkeypatch.setattr(attention_kernels, "kernel_ms", lambda kernel, *_: times[kernel])
    choose = attention_kernels.faster_kernel.__wrapped__
    assert choose(SHAPE, torch.device("cpu")) is getattr(attention_kernels, chosen)


def test_a_shape_that_flash_attn_4_refuses_is_left_to_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> float:
        raise AssertionError("head dimension 6 is not supported")

    monkeypatch.setattr(attention_kernels, "_has_flash_attn_4", lambda: True)
    monkeypatch.setattr(attention_kernels, "kernel_error", refuse)
    with caplog.at_level("INFO"):
        kernel = attention_kernels.faster_kernel.__wrapped__(SHAPE, torch.device("cpu"))
    assert kernel is attention_kernels.torch_flash
    assert "head dimension 6 is not supported" in caplog.text


@pytest.mark.parametrize(("factor", "is_right"), [(1.0, True), (0.5, False)])
@pytest.mark.parametrize("window", [None, 8])
def test_a_kernel_is_held_against_fp64(factor: float, is_right: bool, window: int | None) -> None:
    def kernel(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, *_: int, scale: float, window: int | None):  # noqa: ANN202
        lengths = cu_q.diff().tolist(), cu_k.diff().tolist()
        return per_sequence_attention(q, k, v, *lengths, scale=scale * factor, window=window)

    shape = dataclasses.replace(SHAPE, window=window)
    error = attention_kernels.kernel_error(kernel, shape, torch.device("cpu"))
    assert (error <= attention_kernels.MAX_ERROR[torch.bfloat16]) == is_right


def test_the_padded_layout_gives_what_the_packed_one_gives() -> None:
    args = parse(*DENSE)
    start_single_process(args)
    module = PackedAttention(transformer_config_from_args(args), layer_number=1)
    query, key, value = (torch.randn(10, 4, 4) for _ in range(3))
    cu = cumulative([5, 5])
    params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=5, max_seqlen_kv=5)
    packed = module(query, key, value, packed_seq_params=params)
    assert packed.shape == (10, 1, 16)
    padded = module(*(x.view(2, 5, 4, 4).transpose(0, 1) for x in (query, key, value)))
    assert torch.allclose(padded.transpose(0, 1).reshape(10, 1, 16), packed, atol=1e-6)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--window-size 8,8", r"--window-size is \(8, 8\).*must be LEFT,0"),
        ("--softmax-type off-by-one", "--softmax-type is off-by-one.*must be vanilla"),
        ("--attention-dropout 0.1", "--attention-dropout is 0.1.*must be 0"),
        ("--qk-clip", "--qk-clip is True.*must be False"),
    ],
)
def test_an_option_that_packed_attention_has_not_is_refused(flags: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(*DENSE, *flags.split())
