"""Unknown flags, stray values, and the engines' flags where no engine runs."""

from __future__ import annotations

import pytest

from slime.flags.parse import GROUPS, build_parser, reset_arg
from slime.flags.parser import Parser
from slime.flags.words import engine_flags_are_idle, refuse_unknown, split_engine_flags
from slime.utils.errors import ConfigError


@pytest.fixture(scope="module")
def parser() -> Parser:
    return Parser(GROUPS)


def complaint(parser: Parser, *words: str) -> str:
    _, leftover = parser.parse_known_args(list(words))
    with pytest.raises(ConfigError) as caught:
        refuse_unknown(parser, words, leftover)
    return str(caught.value)


def test_every_unknown_flag_is_named_once(parser):
    text = complaint(parser, "--lrr", "1", "--lr", "1e-5", "--xyzzy=3", "--lrr", "2")
    assert text.splitlines() == [
        "--lrr is not a flag. Did you mean --lr?",
        "--xyzzy is not a flag, and none is like it. See docs/flags.md, or train.py --help.",
    ]


def test_a_value_of_an_unknown_flag_is_no_stray_value(parser):
    assert len(complaint(parser, "--lr", "3", "--lrr", "3").splitlines()) == 1


def test_engine_flags_are_cut_out_with_their_values():
    words = ["--lr", "1", "--sglang-cuda-graph-bs", "1", "2", "--colocate", "--router-policy=random", "--seed", "-3"]
    assert split_engine_flags(words) == (
        ["--lr", "1", "--colocate", "--seed", "-3"],
        ["--sglang-cuda-graph-bs", "--router-policy"],
    )


@pytest.mark.parametrize(
    ("words", "idle"),
    [
        (["--debug-train-only"], True),
        (["--load-debug-rollout-data=x_{rollout_id}.pt"], True),
        (["--debug-rollout-only"], False),
        ([], False),
    ],
)
def test_engine_flags_are_idle_exactly_when_no_engine_runs(words, idle):
    assert engine_flags_are_idle(words) is idle


def test_reset_arg_changes_an_existing_default_and_adds_a_missing_flag():
    parser = Parser()
    parser.add_argument("--steps", type=int, default=1)
    reset_arg(parser, "--steps", type=int, default=7)
    reset_arg(parser, "--colour", default="red")
    assert vars(parser.parse_args([])) == {"steps": 7, "colour": "red"}


def test_none_takes_back_a_number_without_a_default_and_nothing_else(parser):
    args, _ = parser.parse_known_args("--num-rollout 3 --num-rollout none --wandb-run-id none".split())
    assert (args.num_rollout, args.wandb_run_id) == (None, "none")
    with pytest.raises(ConfigError, match="--n-samples-per-eval-prompt: 'none' is not a whole number"):
        parser.parse_known_args(["--n-samples-per-eval-prompt", "none"])


def test_none_takes_back_the_cut_of_a_pipeline_and_settings_of_engines():
    words = [
        *"--decoder-last-pipeline-num-layers 13 --sglang-moe-dense-tp-size 1".split(),
        *"--sglang-speculative-algorithm EAGLE --sglang-speculative-num-steps 4".split(),
    ]
    back = [word if word.startswith("--") else "none" for word in words]
    args, _ = build_parser(with_engine_flags=True).parse_known_args([*words, *back])
    assert (args.decoder_last_pipeline_num_layers, args.sglang_moe_dense_tp_size) == (None, None)
    assert (args.sglang_speculative_algorithm, args.sglang_speculative_num_steps) == (None, None)
