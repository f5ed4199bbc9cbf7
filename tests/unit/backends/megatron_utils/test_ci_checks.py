"""The self-checks of every run and of ``--ci-test``, on made-up numbers."""

from __future__ import annotations

import logging
from argparse import Namespace

import pytest

from slime.backends.megatron_utils.train_reports import SelfChecks
from slime.utils.errors import CheckError
from tests.flag_values import args_with

GOOD = {"ppo_kl": 0.0, "kl_loss": 0.0, "train_rollout_logprob_abs_diff": 0.01, "mtp_loss": 0.5}


def arguments(**overrides) -> Namespace:
    defaults = {
        "ci_test": True,
        "use_critic": False,
        "load": "/start",
        "ref_load": "/start",
    }
    return args_with(**(defaults | overrides))


def check(metrics, *, rollout_id=0, step_id=0, grad_norm=1.0, **overrides) -> None:
    SelfChecks(arguments(**overrides), "actor").step(rollout_id, step_id, GOOD | metrics, grad_norm)


@pytest.mark.parametrize(
    ("metrics", "says"),
    [
        ({"ppo_kl": 1e-6}, "ppo_kl is 1e-06"),
        ({"ppo_kl": -1e-6}, "ppo_kl is -1e-06"),
        ({"ppo_kl": float("nan")}, "ppo_kl is nan"),
        ({"kl_loss": 1e-3}, "kl_loss is 0.001.*--ref-load"),
        ({"train_rollout_logprob_abs_diff": 0.2}, "train_rollout_logprob_abs_diff is 0.2.*threshold is 0.1"),
        ({"mtp_loss": 1.5}, "mtp_loss is 1.5"),
    ],
)
def test_a_number_that_is_off_ends_the_run(metrics, says):
    check({})
    with pytest.raises(CheckError, match=f"actor, rollout 0, step 0: {says}"):
        check(metrics)
    check(metrics, ci_test=False)
    check(metrics, ci_test=False, load="/elsewhere")


def test_the_kl_is_checked_only_where_the_policies_are_equal():
    check({"ppo_kl": 1.0, "kl_loss": 1.0}, step_id=1)
    check({"kl_loss": 1.0}, rollout_id=1)
    check({"ppo_kl": 1.0}, use_rollout_logprobs=True)
    check({"ppo_kl": 1.0, "kl_loss": 1.0}, ci_disable_kl_checker=True)
    with pytest.raises(CheckError):
        check({"ppo_kl": 1.0}, rollout_id=1)


def warnings_of(caplog, metrics, **keywords) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        check(metrics, ci_test=False, **keywords)
    return [record.message for record in caplog.records]


def test_every_run_is_warned_of_a_first_step_that_is_off_policy(caplog):
    (message,) = warnings_of(caplog, {"ppo_kl": 1e-3}, rollout_id=5)
    assert "actor, rollout 5, step 0: ppo_kl is 0.001; at the first step" in message
    assert warnings_of(caplog, {"train_rollout_logprob_abs_diff": 9.0}) == []
    assert warnings_of(caplog, {"ppo_kl": 1.0}, keep_old_actor=True) == []
    assert warnings_of(caplog, {"ppo_kl": 1.0}, ci_disable_kl_checker=True) == []
    assert warnings_of(caplog, {"ppo_kl": 1.0}, loss_type="custom_loss") == []


def test_every_run_is_warned_when_it_began_at_its_reference_and_the_kl_is_not_zero(caplog):
    (message,) = warnings_of(caplog, {"kl_loss": 0.5})
    assert "kl_loss is 0.5" in message and "--ref-load" in message
    assert warnings_of(caplog, {"kl_loss": 0.5}, load="/elsewhere") == [], "another start may differ"
    assert warnings_of(caplog, {"kl_loss": 0.5}, rollout_id=1) == []
    assert warnings_of(caplog, {"kl_loss": 0.5}, rollout_id=2, use_critic=True, num_critic_only_steps=2) != []


def test_the_kl_in_the_reward_of_the_first_rollout_is_checked_too(caplog):
    metrics = {"rollout/kl": 0.25}
    SelfChecks(arguments(), "actor").rollout(0, metrics)  # without a penalty the column is 0 by construction
    with pytest.raises(CheckError, match="rollout 0: rollout/kl is 0.25"):
        SelfChecks(arguments(kl_coef=0.1), "actor").rollout(0, metrics)
    SelfChecks(arguments(kl_coef=0.1), "actor").rollout(1, metrics)
    SelfChecks(arguments(kl_coef=0.1, use_rollout_logprobs=True), "actor").rollout(0, metrics)
    SelfChecks(arguments(kl_coef=0.1, ci_test=False), "actor").rollout(0, metrics)
    assert "rollout/kl is 0.25" in caplog.text


def test_gradient_norms_of_two_runs_are_compared(tmp_path):
    template = str(tmp_path / "{role}_{rollout_id}_{step_id}.pt")
    check({}, grad_norm=5.0, rollout_id=2, ci_save_grad_norm=template)
    assert (tmp_path / "actor_2_0.pt").exists()
    check({}, grad_norm=5.04, rollout_id=2, ci_load_grad_norm=template)
    with pytest.raises(CheckError, match="grad_norm is 5.2, and was 5 in the run"):
        check({}, grad_norm=5.2, rollout_id=2, ci_load_grad_norm=template)
    with pytest.raises(CheckError, match="does not exist"):
        check({}, rollout_id=3, ci_load_grad_norm=template)
