"""Which distillation settings are refused before anything starts, and what they require of the core."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from slime.ext.distill.flags import GROUP
from slime.flags.algorithm import FrozenPolicy
from slime.flags.parse import GROUPS, slime_validate_args
from slime.flags.parser import Parser
from slime.utils.errors import ConfigError, DataError
from tests.unit.flags.conftest import command, model_folder, prompt_file

__all__ = ["command", "model_folder", "prompt_file"]
DISTILLATION = "slime.rollout.on_policy_distillation"


def validated(*words: str) -> Namespace:
    parser = Parser((*GROUPS, GROUP))
    megatron = {"bf16": False, "fp16": False, "ckpt_step": None, "finetune": False}
    args = parser.parse_args(words, namespace=Namespace(**megatron, no_load_optim=False, no_load_rng=False))
    slime_validate_args(args, parser)
    return args


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--use-opd"], "--use-opd needs --opd-type"),
        (["--opd-type", "sglang"], "no effect without --use-opd"),
        (["--opd-teacher-load", "x"], "no effect without --use-opd"),
        (["--opd-teachers", "a=x"], "no effect without --use-opd"),
        (["--use-opd", "--opd-type", "sglang", "--opd-teacher-key", "task"], "no effect without --opd-teachers"),
        (["--use-opd", "--opd-type", "sglang", "--opd-teachers", "http"], "each must be NAME=WHERE"),
        (["--use-opd", "--opd-type", "sglang", "--opd-teachers", "a=x", "a=y"], "each may occur once"),
        (["--use-opd", "--opd-type", "megatron", "--opd-teachers", "a=x", "--opd-teacher-load", "x"], "Drop one"),
        (["--use-opd", "--opd-type", "megatron", "--opd-teachers", "a=/none"], "--opd-teachers"),
        (["--use-opd", "--opd-type", "sglang", "--opd-teachers", "a=http://a/generate", "b=http://b/generate"], None),
        (["--opd-top-k", "4"], "no effect without --use-opd"),
        (["--use-opd", "--opd-type", "sglang", "--opd-top-k", "4", "--rollout-top-p", "0.9"], "make it 1"),
        (["--use-opd", "--opd-type", "sglang", "--opd-top-k", "4", "--loss-type", "sft_loss"], "of the policy loss"),
        (["--use-opd", "--opd-type", "megatron"], "name its checkpoint: --opd-teacher-load"),
        (["--use-opd", "--opd-type", "sglang", "--opd-teacher-load", "x"], "use --opd-type megatron"),
        (["--use-opd", "--opd-type", "megatron", "--opd-teacher-load", "/none"], "--opd-teacher-load"),
        (["--use-opd", "--opd-type", "sglang", "--disable-compute-advantages-and-returns"], "there are none"),
        (["--use-opd", "--opd-type", "sglang", "--loss-type", "sft_loss"], "which --loss-type sft_loss does not use"),
        (
            ["--use-opd", "--opd-type", "sglang", "--custom-rm-path", f"{DISTILLATION}.reward_func"],
            "the teacher at --rm-url",
        ),
        (["--use-opd", "--opd-type", "sglang"], None),
    ],
)
def test_impossible_combinations_are_refused(command: list[str], words: list[str], says: str | None) -> None:
    if says is None:
        validated(*command, *words)
    else:
        with pytest.raises((ConfigError, DataError)) as caught:
            validated(*command, *words)
        assert says in str(caught.value)


def test_the_trainer_keeps_each_teacher_beside_the_actor(command: list[str], model_folder: Path) -> None:
    teachers = [f"{name}={model_folder}" for name in ("math", "code")]
    words = ["--use-opd", "--opd-type", "megatron", "--opd-teacher-key", "task", "--opd-teacher-ckpt-step", "3"]
    args = validated(*command, *words, "--opd-teachers", *teachers)
    assert args.frozen_policies == tuple(
        FrozenPolicy(
            f"teacher {name}", "opd_teachers", str(model_folder), "opd_teacher_ckpt_step", 3, "teacher_log_probs"
        )
        for name in ("math", "code")
    )
    assert args.named_columns == {"teacher_names": ("task", ("math", "code"), "--opd-teachers")}
    assert len(args.advantage_terms) == 1


@pytest.mark.parametrize(("words", "is_said"), [((), False), (("--rollout-temperature", "0.7"), True)])
def test_a_student_at_another_temperature_than_the_teachers_server_is_said(
    command: list[str], caplog: pytest.LogCaptureFixture, words: tuple[str, ...], is_said: bool
) -> None:
    asks = ("--use-opd", "--opd-type", "sglang", "--rm-url", "http://a/generate", "--custom-rm-path")
    validated(*command, *asks, f"{DISTILLATION}.reward_func", *words)
    assert ("a server scores tokens at temperature 1" in caplog.text) == is_said
