"""A rank's data as tensors."""

from __future__ import annotations

import pytest
import torch

from slime.backends.megatron_utils.data import forward_arguments, prepare_rollout_data
from slime.utils.errors import DataError
from tests.unit.train_data.rank_batch import one_rank


@pytest.mark.parametrize("token", [-1, 100])
def test_a_token_that_the_model_does_not_have_is_refused_by_name(token):
    data = one_rank(tokens=[[1, 2, 99], [0, token, 3]], response_lengths=[1, 1], loss_masks=[[1], [1]])
    with pytest.raises(
        DataError, match=f"sample 1 of the train data has the token {token}; .* 0 to 99 .*--vocab-size"
    ):
        prepare_rollout_data(data, vocab_size=100)


def test_multimodal_inputs_that_nothing_takes_are_refused():
    batch = {"tokens": torch.zeros(1, 4), "packed_seq_params": None, "full_loss_masks": None}
    model = torch.nn.Module()
    assert "images" not in forward_arguments(model, {**batch, "multimodal_train_inputs": None})
    with pytest.raises(DataError, match="trainer's model takes none; give --multimodal-keys"):
        forward_arguments(model, {**batch, "multimodal_train_inputs": [None, {"pixel_values": torch.zeros(1)}]})
