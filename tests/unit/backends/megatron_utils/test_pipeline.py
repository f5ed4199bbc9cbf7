"""Every pipeline stage knows the lengths of the next micro-batch: checked by simulating what its neighbors send."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.pipeline_parallel import p2p_communication
from megatron.core.pipeline_parallel.schedules import get_schedule_table

from slime.backends.megatron_utils.data import sample_columns
from slime.backends.megatron_utils.flags.config_builders import num_stages_of_layout
from slime.backends.megatron_utils.forward import KnownShapes
from slime.train_data.context_parallel import CPRank
from slime.train_data.microbatch import PackingConfig, pack_thd, packed_length
from slime.utils.errors import ConfigError

LENGTHS = [8, 40, 16, 24, 64, 32]


class Group:
    """A process group with only a size and a rank."""

    def __init__(self, size: int, rank: int) -> None:
        self._size, self._rank = size, rank

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank


def communicator(
    monkeypatch: pytest.MonkeyPatch, size: int, rank: int, *, num_chunks: int = 1, **config: Any
) -> KnownShapes:
    monkeypatch.setattr(p2p_communication.dist, "get_global_rank", lambda group, rank: rank)
    values = {
        "tensor_model_parallel_size": 1,
        "sequence_parallel": False,
        "hidden_size": 4,
        "microbatch_group_size_per_vp_stage": size,
        "virtual_pipeline_model_parallel_size": num_chunks if num_chunks > 1 else None,
    }
    return KnownShapes(Group(size, rank), SimpleNamespace(**values | config), LENGTHS, num_chunks=num_chunks)  # type: ignore[arg-type]


def arriving(known: KnownShapes, *, forward: bool) -> list[int]:
    """Lengths in the order in which the stage expects them from one side."""
    lengths = []
    while True:
        try:
            previous, following = known._communicate_shapes(None, None, recv_prev=forward, recv_next=not forward)
        except IndexError:
            return lengths
        lengths.append((previous if forward else following)[0])


def sent(size: int, rank: int, num_chunks: int, *, forward: bool) -> list[int]:
    """Lengths that stage ``rank`` passes on: each chunk's work in schedule order, except at the pipeline's ends."""
    is_end = rank == (size - 1 if forward else 0)
    lengths = []
    for micro_batch, position in get_schedule_table(len(LENGTHS), num_chunks, size):
        chunk = position if forward else num_chunks - 1 - position
        if not (is_end and chunk == (num_chunks - 1 if forward else 0)):
            lengths.append(LENGTHS[micro_batch])
    return lengths


@pytest.mark.parametrize(("size", "num_chunks"), itertools.product((2, 3), (1, 2, 3)))
def test_what_a_stage_expects_is_what_its_neighbour_sends(
    monkeypatch: pytest.MonkeyPatch, size: int, num_chunks: int
) -> None:
    for rank in range(size):
        known = communicator(monkeypatch, size, rank, num_chunks=num_chunks)
        assert arriving(known, forward=True) == sent(size, (rank - 1) % size, num_chunks, forward=True)
        assert arriving(known, forward=False) == sent(size, (rank + 1) % size, num_chunks, forward=False)


def test_under_sequence_parallelism_a_tensor_rank_gets_its_share_of_the_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = communicator(monkeypatch, 2, 1, tensor_model_parallel_size=4, sequence_parallel=True)
    assert known._communicate_shapes(None, None, recv_prev=True, recv_next=False) == ((2, 1, 4), (0, 0, 0))


@pytest.mark.parametrize("layout", ["zigzag", "allgather"])
@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_a_packed_length_is_known_without_packing(cp_size: int, layout: Any) -> None:
    for lengths in ([1], [5, 17, 2], [64, 3]):
        packing = PackingConfig(CPRank(0, cp_size), pad_multiple=6, layout=layout)
        tokens = pack_thd([torch.arange(length) for length in lengths], packing).tokens
        assert packed_length(lengths, packing) == tokens.size(1)


def test_a_column_that_a_user_added_reaches_the_loss() -> None:
    data = {
        "tokens": [torch.zeros(3), torch.zeros(4)],
        "rollout_mask_sums": torch.ones(2),
        "my_weights": [0.5, 2.0],
        "raw_reward": [1.0, 0.0],  # of the whole rollout, whose length is the same by chance
        "micro_batch_indices": [[0], [1]],
        "num_microbatches": [2, 2],
        "global_batch_sizes": [1, 1],
        "note": "not a column",
        "of_the_batch": [1, 2, 3],
    }
    assert sample_columns(data) == ["tokens", "rollout_mask_sums", "my_weights"]


def test_a_pipeline_layout_says_how_many_stages_there_are() -> None:
    assert num_stages_of_layout("Ett|(tt|)*2L") == 4
    with pytest.raises(ConfigError, match="stages are separated by bars"):
        num_stages_of_layout("Ex|L")
