"""read_config: attributes, else the defaults of the flags, else those of the config."""

from __future__ import annotations

import dataclasses
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass

import pytest

from slime.flags.config import backend_flags, flag_defaults, read_config
from slime.flags.observability import metrics_config, tracking_config
from slime.flags.reward import add_reward_arguments, reward_config


def add_group(parser: ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rows", type=int, default=None)


@dataclass(frozen=True, kw_only=True)
class Config:
    seconds: float
    rows: int = 0
    path: str | None = None


def test_an_attribute_wins_then_the_flags_default_then_the_fields():
    assert read_config(Config, Namespace(seconds=1.0, path="a.b"), add_group) == Config(seconds=1.0, path="a.b")
    assert read_config(Config, Namespace(rows=None), add_group).rows is None
    assert read_config(Config, Namespace(), add_group) == Config(seconds=5.0, rows=0)


def test_what_nobody_gives_a_value_is_an_error():
    with pytest.raises(TypeError, match="seconds"):
        read_config(Config, Namespace())


def test_the_defaults_are_those_that_the_parser_gives():
    parser = ArgumentParser()
    add_reward_arguments(parser)
    assert dict(flag_defaults(add_reward_arguments)) == vars(parser.parse_args([]))


@pytest.mark.parametrize("make", [reward_config, tracking_config, metrics_config, backend_flags])
def test_a_config_comes_from_an_empty_namespace_and_stays_as_it_is(make):
    config = make(Namespace())
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(config, dataclasses.fields(config)[0].name, 1)
