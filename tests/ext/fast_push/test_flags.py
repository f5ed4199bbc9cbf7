"""The choice between the verified and the plain push."""

from __future__ import annotations

import argparse
from argparse import Namespace
from typing import Any

import pytest

from slime.ext.fast_push.flags import GROUP, PLUGIN
from slime.ext.fast_push.loaders import WEIGHT_LOADERS
from slime.flags.group import derive_all, problems_of
from slime.utils.misc import load_function

OTHERS = {"check_weight_update_equal": False, "weight_push_failure": "stop"}


def parse(*words: str, **others: Any) -> Namespace:
    parser = argparse.ArgumentParser()
    GROUP.add(parser)
    args = Namespace(**vars(parser.parse_args(words)), **{**OTHERS, **others}, weight_loaders=[], engine_plugins=[])
    derive_all(args, [GROUP])
    return args


def test_engines_are_started_with_our_loaders_unless_the_push_is_plain() -> None:
    assert parse().weight_loaders == list(WEIGHT_LOADERS)
    assert all(callable(load_function(path)) for path in (*WEIGHT_LOADERS, PLUGIN))
    plain = parse("--weight-push", "plain")
    assert (plain.weight_loaders, plain.engine_plugins) == ([], [])


@pytest.mark.parametrize(
    ("others", "says"),
    [
        ({"check_weight_update_equal": True}, "compares nothing"),
        ({"weight_push_failure": "drop"}, "--weight-push-failure drop contradict each other"),
    ],
)
def test_what_a_plain_push_cannot_do_is_refused(others: dict[str, Any], says: str) -> None:
    assert says in " ".join(problems_of(parse("--weight-push", "plain", **others), [GROUP]))
    assert problems_of(parse(**others), [GROUP]) == []
