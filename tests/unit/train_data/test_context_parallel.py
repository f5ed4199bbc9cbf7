"""Zigzag and all-gather index arithmetic, by hand and in round trips; packing of tokens and masks."""

import pytest
import torch

from slime.train_data.context_parallel import (
    CPRank,
    allgather_response_windows,
    logits_and_tokens_offsets,
    place_response,
    response_windows,
    slice_response,
    slice_zigzag,
)
from slime.train_data.microbatch import PackingConfig, align_loss_masks, pack_thd, packed_length


def test_ten_tokens_on_two_ranks_by_hand():
    tokens = torch.arange(10)
    assert slice_zigzag(tokens, CPRank(0, 2), pad_value=-1).tolist() == [0, 1, 2, 9, -1, -1]
    assert slice_zigzag(tokens, CPRank(1, 2), pad_value=-1).tolist() == [3, 4, 5, 6, 7, 8]
    # prompt 4, response 6: all response logits are at 3..8, on rank 1
    size, chunks, logits, targets = logits_and_tokens_offsets(10, 6, CPRank(0, 2))
    assert (size, chunks, logits, targets) == (3, ((0, 3), (9, 12)), ((0, 0), (0, 0)), ((0, 0), (0, 0)))
    size, chunks, logits, targets = logits_and_tokens_offsets(10, 6, CPRank(1, 2))
    assert (size, chunks, logits, targets) == (3, ((3, 6), (6, 9)), ((3, 6), (6, 9)), ((4, 7), (7, 10)))
    assert len(slice_response(torch.arange(6), 10, 6, CPRank(0, 2))) == 0
    assert slice_response(torch.arange(6), 10, 6, CPRank(1, 2)).tolist() == [0, 1, 2, 3, 4, 5]


CASES = [(total, response) for total in (2, 3, 5, 8, 13, 40) for response in {0, 1, total // 2, total - 1}]


@pytest.mark.parametrize("cp_size", [1, 2, 3, 4])
def test_pieces_of_all_ranks_make_the_whole_response(cp_size):
    for total, response in CASES:
        values = torch.arange(1.0, response + 1)
        pieces = [slice_response(values, total, response, CPRank(rank, cp_size)) for rank in range(cp_size)]
        placed = [place_response(piece, total, response, CPRank(rank, cp_size)) for rank, piece in enumerate(pieces)]
        assert torch.equal(sum(placed), values), (total, response)
        assert sum(map(len, pieces)) == response


@pytest.mark.parametrize("layout", ["zigzag", "allgather"])
@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_windows_point_at_the_logits_that_predict_the_response(cp_size, layout):
    """The stream carries the tokens themselves; a logit at token t predicts t + 1."""
    totals, responses = [9, 2, 14, 5], [4, 1, 13, 0]
    sequences = [100 * (index + 1) + torch.arange(total) for index, total in enumerate(totals)]
    seen = [[] for _ in totals]
    for rank in range(cp_size):
        packed = pack_thd(sequences, PackingConfig(CPRank(rank, cp_size), pad_multiple=4, layout=layout))
        stream = packed.tokens[0]
        assert len(stream) % 4 == 0
        if layout == "zigzag":
            windows = response_windows(totals, responses, CPRank(rank, cp_size))
        else:
            windows = allgather_response_windows(
                totals, responses, CPRank(rank, cp_size), local_stream_length=len(stream)
            )
        for index, runs in enumerate(windows):
            for run in runs:
                targets = sequences[index][run.token_start : run.token_start + run.length]
                assert torch.equal(stream[run.stream_start : run.stream_start + run.length] + 1, targets)
                seen[index] += targets.tolist()
    for index, response in enumerate(responses):
        assert sorted(seen[index]) == sequences[index][totals[index] - response :].tolist()


def test_packed_stream_by_hand_without_context_parallelism():
    packed = pack_thd([torch.tensor([1, 2, 3]), torch.tensor([4, 5])], PackingConfig(pad_multiple=4), pad_id=9)
    assert packed.tokens.tolist() == [[1, 2, 3, 4, 5, 9, 9, 9]]
    assert packed.cu_seqlens.tolist() == [0, 3, 5, 8]
    assert packed.cu_seqlens.dtype == torch.int32
    assert (packed.max_seqlen, packed.num_real_tokens) == (3, 5)
    assert pack_thd([torch.tensor([1, 2])], PackingConfig(pad_multiple=2)).cu_seqlens.tolist() == [0, 2]


@pytest.mark.parametrize("pad_multiple", [1, 3, 7])
def test_the_padding_of_a_zigzag_stream_falls_into_chunks_too(pad_multiple):
    sequences = [torch.arange(5), torch.arange(2)]
    packed = pack_thd(sequences, PackingConfig(CPRank(1, 2), pad_multiple=pad_multiple))
    assert all(length % 4 == 0 for length in packed.cu_seqlens.diff().tolist())
    assert packed.tokens.shape[1] % pad_multiple == 0
    assert packed_length([5, 2], PackingConfig(CPRank(1, 2), pad_multiple)) == packed.tokens.shape[1]


def test_masks_lie_under_the_logits():
    masks = [torch.tensor([1, 0, 1]), torch.tensor([1])]
    assert align_loss_masks(masks, [5, 2], [3, 1], PackingConfig(pad_multiple=4)).tolist() == [
        [0, 1, 0, 1, 0, 1, 0, 0]
    ]
    rank_1 = align_loss_masks(masks[:1], [5], [3], PackingConfig(CPRank(1, 2)))
    assert rank_1.tolist() == [[0, 1, 0, 0]]
