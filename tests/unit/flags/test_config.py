"""FlagConfig: attributes first, then the flags' defaults, then the config's."""

from __future__ import annotations

import dataclasses
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass

import pytest

from slime.flags.config import BackendFlags, FlagConfig, flag_defaults
from slime.flags.observability import MetricsConfig, TrackingConfig
from slime.flags.reward import RewardConfig, add_reward_arguments


def add_group(parser: ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rows", type=int, default=None)


@dataclass(frozen=True, kw_only=True)
class Config(FlagConfig, flags=(add_group,)):
    seconds: float
    rows: int = 0
    path: str | None = None


def test_an_attribute_wins_then_the_flags_default_then_the_fields():
    assert Config.of(Namespace(seconds=1.0, path="a.b")) == Config(seconds=1.0, path="a.b")
    assert Config.of(Namespace(rows=None)).rows is None
    assert Config.of(Namespace()) == Config(seconds=5.0, rows=0)


def test_what_nobody_gives_a_value_is_an_error():
    @dataclass(frozen=True, kw_only=True)
    class Required(FlagConfig):
        seconds: float

    with pytest.raises(TypeError, match="seconds"):
        Required.of(Namespace())


def test_the_defaults_are_those_that_the_parser_gives():
    parser = ArgumentParser()
    add_reward_arguments(parser)
    assert dict(flag_defaults(add_reward_arguments)) == vars(parser.parse_args([]))


@pytest.mark.parametrize("config_class", [RewardConfig, TrackingConfig, MetricsConfig, BackendFlags])
def test_a_config_comes_from_an_empty_namespace_and_stays_as_it_is(config_class):
    config = config_class.of(Namespace())
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(config, dataclasses.fields(config)[0].name, 1)
