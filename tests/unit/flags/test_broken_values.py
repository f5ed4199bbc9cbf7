"""Every flag of the merged parser accepts the values that it declares, and refuses all others in one line."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from typing import Any

import pytest

from slime.flags.kinds import Number, WholeNumber, file_path, http_url
from slime.flags.parse import build_parser
from slime.flags.parser import Parser
from slime.utils.errors import ConfigError

NUMBERS = ("nan", "inf", "1e400", "-1", "-7", "0", "0.5", "1e30", "9" * 30, "1_000", "\u0663")
HOSTILE = (*NUMBERS, "", " ", "text", "a\0b", "[", "[" * 5000, '{"a":' * 5000, "9" * 5000, "1" + "\n" * 3 + "2")


@pytest.fixture(scope="module")
def parser() -> Parser:
    return build_parser(with_engine_flags=True)


def flags(parser: Parser) -> Iterator[argparse.Action]:
    """Every flag that takes a value."""
    return (action for action in parser._actions if action.option_strings and action.nargs != 0)


def parsed(parser: Parser, action: argparse.Action, text: str) -> list[Any]:
    """The flag's values for ``text``, given as many times as the flag needs.

    Raises:
        ConfigError: the flag does not accept it.
    """
    words = [text] * (action.nargs if isinstance(action.nargs, int) else 1)
    values = parser._get_values(action, words)
    return values if isinstance(values, list) else [values]


def outcome(parser: Parser, action: argparse.Action, text: str) -> list[Any] | str:
    """The flag's values, or its error message; anything except an ArgumentError is a traceback, and fails the test."""
    try:
        return parsed(parser, action, text)
    except argparse.ArgumentError as error:
        try:
            parser.error(str(error))
        except ConfigError as shown:
            return str(shown)


def test_no_value_of_any_flag_ends_in_a_traceback_or_in_more_than_one_line(parser):
    wrong = []
    for action in flags(parser):
        for text in HOSTILE:
            result = outcome(parser, action, text)
            if isinstance(result, str) and (
                "\n" in result or len(result) > 4000 or action.option_strings[0] not in result
            ):
                wrong.append((action.option_strings[0], text[:20], result[:200]))
    assert wrong == []


def test_a_number_is_taken_exactly_when_the_flag_declares_it(parser):
    declared = [
        action for action in flags(parser) if isinstance(action.type, Number | WholeNumber) and not action.choices
    ]
    assert len(declared) > 300
    for action in declared:
        kind = action.type
        for text in NUMBERS:
            result = outcome(parser, action, text)
            if isinstance(result, list):
                for value in result:
                    assert math.isfinite(value) and (
                        kind.low <= value <= kind.high or value == getattr(kind, "also", None)
                    )
            else:
                assert text[:20] in result and ("is not a" in result), result


def test_a_flag_that_declares_int_or_float_or_nothing_is_guarded_too():
    parser = Parser()
    parser.add_argument("--steps", type=int)
    parser.add_argument("--rate", type=float)
    parser.add_argument("--note")
    for words in (["--steps", "9" * 30], ["--rate", "nan"], ["--rate", "inf"], ["--note", "a\0b"]):
        with pytest.raises(ConfigError, match=words[0]):
            parser.parse_args(words)
    assert parser.parse_args(["--note", ""]).note == ""


def test_paths_and_addresses_are_not_empty(parser):
    paths = [action for action in flags(parser) if action.type in (file_path, http_url)]
    assert {"--save", "--load", "--hf-checkpoint", "--prompt-data", "--rm-url", "--custom-rm-path"} <= {
        action.option_strings[0] for action in paths
    }
    for action in paths:
        assert isinstance(outcome(parser, action, ""), str)
        assert isinstance(outcome(parser, action, "a\0b"), str)


@pytest.mark.parametrize(
    "url", ["grader", "localhost:8000/x", "ftp://a/b", "http://", "http://a:99999/", "http://a b/", "//a"]
)
def test_an_address_that_is_none_is_refused(parser, url):
    with pytest.raises(ConfigError, match="argument --rm-url: .* is no address"):
        parser.parse_args(["--rm-url", url])


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000/generate", "https://[::1]:1/x", "http://grader"])
def test_an_address_is_taken_as_it_is(parser, url):
    assert parser.parse_args(["--rm-url", url]).rm_url == url


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--seed -1", "--seed: -1 is not a whole number of 0 or more and at most 2147483647"),
        ("--sglang-router-port 70000", "--sglang-router-port: 70000 is not"),
        ("--sglang-disaggregation-bootstrap-port 0", "--sglang-disaggregation-bootstrap-port: 0 is not"),
        ("--sglang-max-total-tokens=-3", "--sglang-max-total-tokens: -3 is not a whole number of 0 or more, or -1"),
        ("--rm-timeout-s inf", "--rm-timeout-s: inf is not a finite number above 0 and at most 1e+09"),
        ("--window-size 1,x", "--window-size: 'x' is not a whole number"),
        ('--train-env-vars {"A":[1]}', "'A': [1] is no environment variable"),
        ('--train-env-vars {"A":"1","A":"2"}', "it has the key 'A' twice"),
        ('--multimodal-keys {"image":3}', "'image' is 3; it must be a text in quotes"),
        ("--wandb-run-id a/b", "--wandb-run-id: 'a/b' is no name for Weights & Biases"),
    ],
)  # fmt: skip
def test_a_broken_value_is_named_with_what_is_allowed(parser, words, says):
    with pytest.raises(ConfigError) as caught:
        parser.parse_args(words.split())
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_numbers_of_the_original_stay_legal(parser):
    words = (
        "--rollout-top-k -1 --log-probs-chunk-size -1 --fetch-trajectory-retry-times -1 --seed 0 --num-rollout 3000 "
        "--rollout-num-gpus 0 --sglang-chunked-prefill-size -1 --router-max-concurrent-requests -1 --kl-coef 0.00 "
        "--eps-clip-c 10 --moe-aux-loss-coeff 0 --weight-decay 0.1 --lr-warmup-iters 0 --update-weight-buffer-size "
        "8589934592 --sglang-context-length 8k --window-size (128,0) --moe-layer-freq [0]*1+[1]*2 --clip-grad 0"
    )
    args = parser.parse_args(words.split())
    assert (args.sglang_context_length, args.window_size, args.moe_layer_freq) == (8000, (128, 0), [0, 1, 1])
