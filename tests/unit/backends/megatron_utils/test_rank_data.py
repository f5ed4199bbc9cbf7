"""The data of a rank, as tensors."""

from __future__ import annotations

import pytest

from slime.backends.megatron_utils.data import prepare_rollout_data
from slime.utils.errors import DataError
from tests.unit.train_data.rank_batch import one_rank


@pytest.mark.parametrize("token", [-1, 100])
def test_a_token_that_the_model_does_not_have_is_refused_by_name(token):
    data = one_rank(tokens=[[1, 2, 99], [0, token, 3]], response_lengths=[1, 1], loss_masks=[[1], [1]])
    with pytest.raises(
        DataError, match=f"sample 1 of the train data has the token {token}; .* 0 to 99 .*--vocab-size"
    ):
        prepare_rollout_data(data, vocab_size=100)
