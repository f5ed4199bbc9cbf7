"""--allgather-cp on two ranks: what is packed where, and the way back to the pieces that the loss works on."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest
import torch

from slime.backends.megatron_utils import cpu_platform  # noqa: F401

# isort: split
from megatron.core import mpu

from slime.backends.megatron_utils.cp_utils import packing_of, slice_log_prob_with_cp, zigzag_from_contiguous
from slime.backends.megatron_utils.data import DataIterator, get_batch
from slime.backends.megatron_utils.log_probs import get_values, response_rows
from tests.matrix.pool import run_ranks

pytestmark = pytest.mark.dist

TOTAL, RESPONSE = [9, 2, 30, 5], [4, 1, 17, 4]
STARTS = [0, 9, 11, 41]
NUM_TOKENS = sum(TOTAL)


def per_token_values() -> list[torch.Tensor]:
    """One different number for every response token, sample by sample."""
    return [100.0 * index + torch.arange(float(count)) for index, count in enumerate(RESPONSE)]


def on_one_of_two_ranks() -> dict[str, Any]:
    mpu.initialize_model_parallel(context_parallel_size=2)
    args = Namespace(allgather_cp=True, data_pad_size_multiplier=4)
    tokens = [start + torch.arange(total) for start, total in zip(STARTS, TOTAL, strict=True)]
    masks = [torch.ones(count, dtype=torch.int) for count in RESPONSE]
    data = {"tokens": tokens, "total_lengths": TOTAL, "response_lengths": RESPONSE, "loss_masks": masks}
    batch = get_batch(DataIterator(data, [[0, 1, 2, 3]]), ["tokens"], packing_of(args))
    length = batch["tokens"].shape[1]

    # What the model would give: at position p of the stream the value of the response token p + 1.
    stream = torch.zeros(2 * length)
    for start, total, values in zip(STARTS, TOTAL, per_token_values(), strict=True):
        stream[start + total - len(values) - 1 : start + total - 1] = values
    first = mpu.get_context_parallel_rank() * length
    logits = stream[first : first + length].reshape(1, -1, 1).requires_grad_()
    lengths = {"total_lengths": TOTAL, "response_lengths": RESPONSE}
    _, result = get_values(logits, args=args, unconcat_tokens=tokens, **lengths)
    expected = [
        slice_log_prob_with_cp(values, total, response)
        for values, total, response in zip(per_token_values(), TOTAL, RESPONSE, strict=True)
    ]
    # Each rank's loss weighs its own pieces by 1 (rank 0) or 3 (rank 1).
    loss = (1.0 + 2.0 * mpu.get_context_parallel_rank()) * torch.cat(result["values"]).sum()
    (gradient,) = torch.autograd.grad(loss, logits)
    rows, positions = response_rows(logits, TOTAL, RESPONSE, allgather_cp=args.allgather_cp)
    values = logits[0, rows, 0].detach()
    pieces = zigzag_from_contiguous({"values": values, "negated": -values}, positions, TOTAL, RESPONSE)
    return {
        "tokens": batch["tokens"][0].tolist(),
        "offsets": batch["packed_seq_params"].cu_seqlens_q.tolist(),
        "mask": batch["full_loss_masks"][0].tolist(),
        "equal": [torch.equal(a, b) for a, b in zip(result["values"], expected, strict=True)],
        "negated": all(torch.equal(a, -b) for a, b in zip(*pieces.values(), strict=True)),
        "owned": [len(piece) for piece in expected],
        "gradient": gradient.flatten().tolist(),
    }


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(on_one_of_two_ranks, 2)


def test_each_rank_takes_its_part_of_the_whole_stream_and_knows_all_offsets(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["tokens"] + ranks[1]["tokens"] == [*range(NUM_TOKENS), 0, 0]
    assert ranks[0]["offsets"] == ranks[1]["offsets"] == [0, 9, 11, 41, 46, 48]


def test_values_come_back_as_the_pieces_that_zigzag_would_have(ranks: list[dict[str, Any]]) -> None:
    assert all(all(rank["equal"]) and rank["negated"] for rank in ranks)
    assert [sum(owned) for owned in zip(*(rank["owned"] for rank in ranks), strict=True)] == RESPONSE


def test_the_gradient_finds_the_way_to_the_rank_that_computed_the_value(ranks: list[dict[str, Any]]) -> None:
    gradient = ranks[0]["gradient"] + ranks[1]["gradient"]
    mask = ranks[0]["mask"] + ranks[1]["mask"]
    assert {value for value, kept in zip(gradient, mask, strict=True) if kept} == {1.0, 3.0}
    assert not any(value for value, kept in zip(gradient, mask, strict=True) if not kept)
    owned = [sum(rank["owned"]) for rank in ranks]
    assert (gradient.count(1.0), gradient.count(3.0)) == (owned[0], owned[1])
