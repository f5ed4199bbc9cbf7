"""The data of a rank, as tensors."""

from __future__ import annotations

import pytest
import torch
from megatron.core.models.gpt import GPTModel

from slime.backends.megatron_utils.data import forward_arguments, prepare_rollout_data
from slime.backends.megatron_utils.layers.vision import VisionModel
from slime.utils.errors import DataError
from tests.unit.train_data.rank_batch import one_rank


@pytest.mark.parametrize("token", [-1, 100])
def test_a_token_that_the_model_does_not_have_is_refused_by_name(token):
    data = one_rank(tokens=[[1, 2, 99], [0, token, 3]], response_lengths=[1, 1], loss_masks=[[1], [1]])
    with pytest.raises(
        DataError, match=f"sample 1 of the train data has the token {token}; .* 0 to 99 .*--vocab-size"
    ):
        prepare_rollout_data(data, vocab_size=100)


def test_a_users_model_gets_the_pixels_of_all_samples_joined_as_floats():
    limits = torch.tensor([127.5, 127.5])
    in_bytes = {"pixel_values": torch.tensor([[0], [255]], dtype=torch.uint8), "pixel_range": limits}
    inputs = [
        {**in_bytes, "image_grid_thw": torch.tensor([[1, 1, 2]])},
        None,
        {"pixel_values": torch.tensor([[0.5]]), "image_grid_thw": torch.tensor([[1, 1, 1]])},
    ]
    batch = {
        "tokens": torch.zeros(1, 4), "packed_seq_params": None, "full_loss_masks": None,
        "multimodal_train_inputs": inputs, "host_tokens": ["ids"] * 3,
    }  # fmt: skip
    given = forward_arguments(torch.nn.Module(), batch)
    assert given["pixel_values"].tolist() == [[-1.0], [1.0], [0.5]]
    assert given["image_grid_thw"].tolist() == [[1, 1, 2], [1, 1, 1]]
    assert "pixel_range" not in given and "images" not in given
    own = forward_arguments(object.__new__(VisionModel), batch)["images"]
    assert own.inputs is inputs and own.sequences == ["ids"] * 3
    text_model = object.__new__(GPTModel)
    assert "images" not in forward_arguments(text_model, {**batch, "multimodal_train_inputs": None})
    with pytest.raises(DataError, match="trainer's model has no vision tower; give --multimodal-keys"):
        forward_arguments(text_model, batch)
