"""Flags that choose an algorithm: their values come from the registries, and errors list them."""

from __future__ import annotations

import logging
import re

import pytest

from slime.algorithms.advantages import ESTIMATORS, get_estimator
from slime.algorithms.kl import KL_KINDS
from slime.flags.algorithm import ACTOR_LOSS_TYPES
from slime.flags.kinds import RegistryChoices
from slime.flags.parse import slime_validate_args
from slime.utils.errors import ConfigError, HookError

FULLY_ASYNC = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"
RLOO = "examples.custom_estimator.rloo.rloo"


@pytest.mark.parametrize(
    ("flag", "names"),
    [
        ("--advantage-estimator", tuple(ESTIMATORS)),
        ("--kl-loss-type", tuple(KL_KINDS)),
        ("--loss-type", ACTOR_LOSS_TYPES),
    ],
)
def test_every_name_is_taken_and_another_is_answered_with_all_of_them(make_args, flag, names):
    for name in names:
        assert getattr(make_args(flag, name), flag[2:].replace("-", "_")) == name
    with pytest.raises(ConfigError) as caught:
        make_args(flag, "nonsense")
    assert flag in str(caught.value) and "nonsense" in str(caught.value)
    assert all(name in str(caught.value) for name in names)


def test_an_estimator_may_be_an_import_path_and_a_kl_may_not(make_args):
    slime_validate_args(args := make_args("--advantage-estimator", RLOO))
    assert get_estimator(args.advantage_estimator).group_baseline is not None and not args.use_critic
    with pytest.raises(ConfigError):
        make_args("--kl-loss-type", "my_package.kl")
    assert list(RegistryChoices(ESTIMATORS)) == list(ESTIMATORS)


def test_a_path_that_leads_nowhere_stops_the_run_before_it_starts(make_args):
    with pytest.raises(HookError, match="--advantage-estimator: .*no_such_module"):
        slime_validate_args(make_args("--advantage-estimator", "no_such_module.rloo"))


def test_an_overlay_may_name_an_import_path_too(make_args, tmp_path):
    file = tmp_path / "overlay.yaml"
    file.write_text(f"advantage_estimator: {RLOO}\n")
    slime_validate_args(args := make_args("--custom-config-path", str(file)))
    assert args.advantage_estimator == RLOO


def test_the_policy_loss_is_refused_without_advantages(make_args):
    with pytest.raises(ConfigError, match="--loss-type policy_loss needs advantages"):
        slime_validate_args(make_args("--disable-compute-advantages-and-returns"))
    slime_validate_args(make_args("--disable-compute-advantages-and-returns", "--loss-type", "sft_loss"))


def test_rejection_needs_something_that_rejects(make_args, tmp_path):
    file = tmp_path / "overlay.yaml"
    file.write_text("use_rs: true\n")
    with pytest.raises(ConfigError, match="use_rs of --custom-config-path"):
        slime_validate_args(make_args("--custom-config-path", str(file)))
    mis = "examples.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp"
    slime_validate_args(make_args("--custom-config-path", str(file), "--custom-tis-function-path", mis))


def test_a_kl_coefficient_that_no_advantage_sees_is_said_to_do_nothing(make_args, caplog):
    reinforce = ("--advantage-estimator", "reinforce_plus_plus", "--normalize-advantages")
    with caplog.at_level(logging.WARNING):
        slime_validate_args(make_args("--kl-coef", "0.1", *reinforce))
        assert "takes no part" not in caplog.text
        slime_validate_args(make_args("--kl-coef", "0.1"))
    assert "--kl-coef 0.1 is logged, but takes no part in the advantages of --advantage-estimator grpo" in caplog.text


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (("--advantage-estimator", "cispo", "--eps-clip", "1", "--eps-clip-c", "3"), "--eps-clip-c"),
        (("--keep-old-actor", "--use-rollout-logprobs"), "--keep-old-actor"),
        (("--loss-type", "sft_loss", "--use-kl-loss"), "--use-kl-loss"),
        (
            ("--rollout-function-path", FULLY_ASYNC, "--over-sampling-batch-size", "64"),
            "--over-sampling-batch-size 64",
        ),
    ],
)
def test_a_flag_that_does_nothing_beside_another_is_named(make_args, caplog, words, flag):
    with caplog.at_level(logging.WARNING):
        slime_validate_args(make_args(*words))
    assert re.search(rf"{flag}( 64)? has no effect", caplog.text)
