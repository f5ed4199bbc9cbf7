"""Losses from outside the tree: Dr. GRPO's reducer, which ignores a response's length, and REINFORCE."""

from __future__ import annotations

import pytest

from tests.unit.backends.megatron_utils.megatron_case import parse, start_single_process
from tests.unit.backends.megatron_utils.test_loss import MODEL_FLAGS, make_args, make_batch, make_logits, run

REDUCER = "examples.DrGRPO.custom_reducer.get_pg_loss_reducer"


def test_every_trained_token_weighs_the_same_and_the_other_means_stay():
    start_single_process(parse(*MODEL_FLAGS))
    batch = make_batch(masks=((1,), (1, 1, 0, 1)), advantages=[[2.0], [-1.0] * 4])
    args = make_args(custom_pg_loss_reducer_function_path=REDUCER, entropy_coef=0.0)
    logits = make_logits(batch, [[-1.0], [-1.0] * 4])
    value, metrics = run(args, batch, logits)
    assert value == metrics["pg_loss"] == pytest.approx((-2.0 + 3 * 1.0) / 1000)
    assert metrics["entropy_loss"] == pytest.approx(run(make_args(), batch, logits)[1]["entropy_loss"])


def test_reinforce_is_the_mean_of_advantage_times_log_prob_over_trained_tokens():
    start_single_process(parse(*MODEL_FLAGS))
    batch = make_batch(masks=((1,), (1, 1, 0, 1)), advantages=[[2.0], [-1.0, -1.0, 9.0, -1.0]])
    logits = make_logits(batch, [[-0.5], [-1.0, -2.0, -5.0, -3.0]])
    args = make_args(loss_type="custom_loss", custom_loss_function_path="examples.custom_loss.reinforce")
    value, metrics = run(args, batch, logits, "custom_loss")
    assert value == metrics["loss"] == metrics["pg_loss"] == pytest.approx(2.0 * 0.5 - (1.0 + 2.0 + 3.0) / 3)
