"""The clients' losses against values by hand and the trainer's own formulas, and refused passes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from slime.algorithms.policy_losses.cispo import cispo_loss
from slime.algorithms.policy_losses.inputs import ClipConfig
from slime.algorithms.policy_losses.ppo_clip import clipped_policy_loss
from slime.ext.training_api.backend import Datum, PassRequest, RequestRefused
from slime.ext.training_api.losses import LOSSES, check_pass

LOG_2 = math.log(2)
SAMPLED = {"logprobs": [-2.0, -2.0, -2.0], "advantages": [1.0, -1.0, 2.0]}
LOG_PROBS = [-2.0 + LOG_2, -2.0 + LOG_2, -2.0 - LOG_2]
"""Ratios of 2, 2 and a half."""
MEAN = math.exp(LOG_2 / 3)
CASES: dict[str, tuple[dict[str, list[float]], dict[str, float], list[float], list[float]]] = {
    # name: inputs, config, losses, gradients by the log-probs
    "cross_entropy": ({"weights": [1, 0, 0.5]}, {}, [2 - LOG_2, 0, 1 + LOG_2 / 2], [-1, 0, -0.5]),
    "importance_sampling": (SAMPLED, {}, [-2, 2, -1], [-2, 2, -1]),
    "ppo": (SAMPLED, {}, [-1.2, 2, -1], [0, 2, -1]),
    "cispo": (
        SAMPLED,
        {"clip_high_threshold": 1.5},
        [1.5 * (2 - LOG_2), -1.5 * (2 - LOG_2), 1.6 * (2 + LOG_2)],
        [-1.5, 1.5, -1.6],
    ),
    "dro": (
        SAMPLED,
        {"beta": 0.1},
        [2 - LOG_2 + 0.05 * LOG_2**2, -2 + LOG_2 + 0.05 * LOG_2**2, 4 + 2 * LOG_2 + 0.05 * LOG_2**2],
        [-1 + 0.1 * LOG_2, 1 + 0.1 * LOG_2, -2 - 0.1 * LOG_2],
    ),
    "gspo": (
        SAMPLED | {"sequence_ratio_mask": [1, 1, 1]},
        {"clip_high_threshold": 2},
        [-MEAN, MEAN, -2 * MEAN],
        [-2 / 3 * MEAN] * 3,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_loss_and_its_gradient_have_the_values_of_the_formula(name: str) -> None:
    inputs, config, losses, gradients = CASES[name]
    log_prob = torch.tensor(LOG_PROBS, requires_grad=True)
    loss = LOSSES[name].compute(log_prob, {key: torch.tensor(value) for key, value in inputs.items()}, config)
    loss.sum().backward()
    assert loss.tolist() == pytest.approx(losses, rel=1e-5)
    assert log_prob.grad.tolist() == pytest.approx(gradients, rel=1e-5)


def test_every_loss_has_a_case() -> None:
    assert CASES.keys() == LOSSES.keys()


@pytest.mark.parametrize("name", ["ppo", "cispo"])
def test_clipped_losses_are_those_of_the_trainer_where_the_clip_is_one_number(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    log_prob, sampled, advantages = torch.randn(3, 200, generator=generator)
    clip, config = ClipConfig(low=0.25, high=0.5), {"clip_low_threshold": 0.75, "clip_high_threshold": 1.5}
    loss = LOSSES[name].compute(log_prob, {"logprobs": sampled, "advantages": advantages}, config)
    if name == "ppo":
        wanted, _ = clipped_policy_loss(log_prob - sampled, advantages, clip)
    else:
        wanted, _ = cispo_loss(log_prob - sampled, log_prob, advantages, clip)
    torch.testing.assert_close(loss, wanted)


def test_a_threshold_of_a_token_wins_over_that_of_the_request() -> None:
    inputs = {"logprobs": torch.zeros(2), "advantages": torch.ones(2), "clip_high_threshold": torch.tensor([1.1, 9.0])}
    loss = LOSSES["ppo"].compute(torch.full((2,), LOG_2), inputs, {"clip_high_threshold": 1.3})
    assert loss.tolist() == pytest.approx([-1.1, -2])


GOOD = Datum([1, 2, 3], {"target_tokens": np.array([2, 3, 4]), "weights": np.ones(3, np.float32)})
PPO = {name: np.zeros(3, np.float32) for name in ("logprobs", "advantages")}


def changed(**inputs: Any) -> Datum:
    return replace(
        GOOD, inputs={name: value for name, value in {**GOOD.inputs, **inputs}.items() if value is not None}
    )


@pytest.mark.parametrize(
    ("data", "loss", "config", "message"),
    [
        ([GOOD], "stable_reinforce", {}, "not served: its formula is not published"),
        ([GOOD], "custom", {}, "would run a client's code"),
        ([GOOD], "dpo", {}, "'dpo', which is not served; use cross_entropy"),
        ([GOOD], "cross_entropy", {"beta": 1.0}, "has 'beta'; cross_entropy takes nothing"),
        ([changed(weights=None, **PPO)], "dro", {"beta": math.nan}, "beta nan; it must be a finite number"),
        ([changed(weights=None, **PPO)], "dro", {"beta": True}, "beta True"),
        ([], "cross_entropy", {}, "data is empty"),
        ([GOOD, replace(GOOD, tokens=[])], "cross_entropy", {}, r"data\[1\].model_input has 0 tokens"),
        ([replace(GOOD, tokens=[1] * 9)], "cross_entropy", {}, "has 9 tokens; it must have 1 to 8"),
        (
            [replace(GOOD, tokens=[1, 2, 50])],
            "cross_entropy",
            {},
            "has a token that is not one of 0 to 49",
        ),
        ([changed(target_tokens=np.array([1, 2, -1]))], "cross_entropy", {}, "target_tokens has a token that"),
        ([changed(target_tokens=np.array([1.0, 2, 3]))], "cross_entropy", {}, "target_tokens has a token that"),
        ([changed(target_tokens=np.array([1, 2]))], "cross_entropy", {}, r"has the shape \[2\]; it must be \[3\]"),
        ([changed(target_tokens=np.zeros((3, 0), int))], "cross_entropy", {}, r"has the shape \[3, 0\]"),
        ([changed(target_tokens=None)], "cross_entropy", {}, "has no 'target_tokens'"),
        ([changed(weights=None, **PPO, mask=np.ones(3))], "ppo", {}, "has 'mask'; this loss takes target_tokens"),
        ([changed(weights=None, logprobs=PPO["logprobs"])], "ppo", {}, "has no 'advantages', which this loss needs"),
        ([changed(weights=np.ones((3, 1), np.float32))], "cross_entropy", {}, r"weights has the shape \[3, 1\]"),
        ([changed(weights=np.array([1, np.inf, 0]))], "cross_entropy", {}, "weights has a number that is not finite"),
    ],
)
def test_a_pass_that_cannot_be_is_refused_by_its_field(
    data: list[Datum], loss: str, config: dict[str, float], message: str
) -> None:
    with pytest.raises(RequestRefused, match=message):
        check_pass(PassRequest("m", data, loss, config), vocab_size=50, max_tokens=8)


def test_a_pass_that_can_be_is_not_refused() -> None:
    several = Datum([1, 2], {"target_tokens": np.array([[1, 2, 3], [4, 5, 6]])})
    check_pass(PassRequest("m", [GOOD, several], "cross_entropy"), vocab_size=50, max_tokens=8)
