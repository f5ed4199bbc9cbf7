"""Shifted tokens and targets of multi-token prediction, against positions counted by hand and one by one."""

from __future__ import annotations

import random

import pytest
import torch

from slime.train_data.context_parallel import CPRank
from slime.train_data.microbatch import PackingConfig, pack_thd
from slime.train_data.multi_token import multi_token_depths

TOKENS = [torch.tensor([10, 11, 12, 13, 14]), torch.tensor([20, 21, 22])]
MASKS = [torch.tensor([1, 0, 1]), torch.tensor([1, 1])]


def test_inputs_and_targets_by_hand():
    first, second = multi_token_depths(2, TOKENS, MASKS, [4.0, 2.0], PackingConfig())
    assert first.input_ids.tolist() == [[11, 12, 13, 14, 0, 21, 22, 0]]
    # Position 0 predicts token 2, the response's first; the second sequence's prompt has one token, so only its
    # token 2 is within reach.
    assert first.row_R.tolist() == [0, 1, 2, 5]
    assert first.target_R.tolist() == [12, 13, 14, 22]
    assert first.weight_R.tolist() == [0.25, 0.0, 0.25, 0.5]
    assert second.input_ids.tolist() == [[12, 13, 14, 0, 0, 22, 0, 0]]
    assert second.row_R.tolist() == [0, 1]
    assert second.target_R.tolist() == [13, 14]
    assert second.weight_R.tolist() == [0.0, 0.25]


def test_all_tokens_weigh_the_same_without_denominators_and_an_empty_rollout_divides_by_one():
    (depth,) = multi_token_depths(1, TOKENS, MASKS, None, PackingConfig())
    assert depth.weight_R.tolist() == [1, 0, 1, 1]
    (depth,) = multi_token_depths(1, TOKENS, [mask * 0 for mask in MASKS], [0.0, 0.0], PackingConfig())
    assert depth.weight_R.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("layout", ["zigzag", "allgather"])
@pytest.mark.parametrize("cp_size", [1, 2, 3])
def test_the_ranks_together_predict_every_token_once_from_where_it_can_be_predicted(layout, cp_size):
    generator = random.Random(cp_size)
    lengths = [(generator.randrange(1, 6), generator.randrange(0, 9)) for _ in range(7)]
    sequences = [torch.randint(1, 999, (prompt + response,)) for prompt, response in lengths]
    masks = [torch.randint(0, 2, (response,)) for _, response in lengths]
    denominators = [float(index + 1) for index in range(len(lengths))]
    # The sequence and position of every row on every rank.
    origin = [torch.arange(len(sequence)) + 1000 * index for index, sequence in enumerate(sequences)]
    for number in range(3):
        found = []
        for rank in range(cp_size):
            packing = PackingConfig(CPRank(rank, cp_size), pad_multiple=4, layout=layout)
            depth = multi_token_depths(3, sequences, masks, denominators, packing)[number]
            where = pack_thd(origin, packing, pad_id=-1).tokens[0]
            assert depth.input_ids.shape == (1, len(where))
            for row, source in enumerate(where.tolist()):
                index, position = divmod(source, 1000)
                ahead = position + number + 1
                is_inside = source >= 0 and ahead < len(sequences[index])
                assert depth.input_ids[0, row] == (sequences[index][ahead] if is_inside else 0)
            rows = zip(depth.row_R.tolist(), depth.target_R.tolist(), depth.weight_R.tolist(), strict=True)
            found += [(int(where[row]), target, weight) for row, target, weight in rows]
        expected = []
        for index, ((prompt, response), mask) in enumerate(zip(lengths, masks, strict=True)):
            for token in range(prompt, prompt + response):
                position = token - number - 2
                if position >= 0:
                    weight = float(mask[token - prompt]) / (index + 1)
                    expected.append((1000 * index + position, int(sequences[index][token]), weight))
        assert [entry[:2] for entry in sorted(found)] == [entry[:2] for entry in sorted(expected)]
        assert [entry[2] for entry in sorted(found)] == pytest.approx([entry[2] for entry in sorted(expected)])
