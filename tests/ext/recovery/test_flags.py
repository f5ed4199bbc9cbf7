"""Settings derived from the restart flags, by hand."""

from __future__ import annotations

import argparse
from argparse import Namespace
from typing import Any

import pytest

from slime.ext.recovery.flags import GROUP, add_recovery_arguments, derive_recovery
from slime.flags.group import problems_of

SAVES: dict[str, Any] = {"save": "/ckpt", "save_interval": 9}


def resolved(words: str, **values: Any) -> Namespace:
    others = dict.fromkeys(("no_save_optim", "use_stateless_adam", "colocate", "debug_rollout_only"), False)
    parser = argparse.ArgumentParser()
    add_recovery_arguments(parser)
    args = parser.parse_args(words.split(), Namespace(**{"save": None, "save_interval": None} | others | values))
    derive_recovery(args)
    return args


def test_copies_in_memory_need_a_checkpoint_behind_them():
    args = resolved("--trainer-recovery memory", **SAVES)
    assert (args.state_copy_interval, args.restarts_trainer) == (1, True)
    assert problems_of(args, [GROUP]) == []


@pytest.mark.parametrize(
    ("words", "values", "message"),
    [
        ("--trainer-recovery memory", {}, "memory has no effect without --save-interval"),
        ("--trainer-recovery memory", SAVES | {"no_save_optim": True}, "drop --no-save-optim"),
        ("--memory-checkpoint-interval 3", SAVES, "3 has no effect without --trainer-recovery memory"),
        ("--spare-nodes 2", {}, "--spare-nodes 2 has no effect without --trainer-recovery checkpoint or"),
        ("--spare-nodes 2", SAVES | {"colocate": True}, "the engines of a node die with it"),
    ],
)
def test_what_a_restart_needs_is_named(words, values, message):
    assert any(message in line for line in problems_of(resolved(words, **values), [GROUP]))
    assert problems_of(resolved("--spare-nodes 2", **SAVES), [GROUP]) == []


def test_a_trainer_without_optimizer_state_is_restarted_where_its_optimizer_has_none():
    for is_stateless, mode in ((False, "off"), (True, "checkpoint")):
        args = resolved("", **SAVES, no_save_optim=True, use_stateless_adam=is_stateless)
        assert (args.trainer_recovery, args.state_copy_interval) == (mode, None)
