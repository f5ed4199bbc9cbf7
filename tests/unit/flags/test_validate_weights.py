"""Which flags of the weight update can be combined."""

from __future__ import annotations

import pytest

from slime.flags.parse import slime_validate_args


@pytest.mark.parametrize(
    ("words", "policy"),
    [
        ((), "stop"),
        (("--use-fault-tolerance",), "refill"),
        (("--use-fault-tolerance", "--weight-push-failure", "drop"), "drop"),
    ],
)
def test_engines_that_take_no_push_are_started_again_where_engines_are_at_all(make_args, words, policy):
    args = make_args(*words)
    slime_validate_args(args)
    assert args.weight_push_failure == policy
