"""What follows from the flags of restarts, by hand."""

from __future__ import annotations

import argparse
from argparse import Namespace
from typing import Any

import pytest

from slime.ext.recovery.flags import (
    add_recovery_arguments,
    check_spare_nodes,
    check_trainer_recovery,
    derive_recovery,
)

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
    assert list(check_trainer_recovery(args)) == []


@pytest.mark.parametrize(
    ("words", "values", "message"),
    [
        (
            "--trainer-recovery memory",
            {},
            "memory: where its copies are lost it restarts from a checkpoint; give --save",
        ),
        ("--trainer-recovery memory", SAVES | {"no_save_optim": True}, "memory needs the optimizer's state"),
        ("--memory-checkpoint-interval 3", SAVES, "--memory-checkpoint-interval 3 is of --trainer-recovery memory"),
    ],
)
def test_what_a_restart_needs_is_named(words, values, message):
    assert any(message in line for line in check_trainer_recovery(resolved(words, **values)))


def test_gpus_in_reserve_are_refused_where_nobody_would_take_them():
    assert list(check_spare_nodes(resolved("--spare-nodes 2", **SAVES))) == []
    for values, message in (
        ({}, "--trainer-recovery off starts nothing on them"),
        (SAVES | {"colocate": True}, "with --colocate the engines of a node die with it"),
    ):
        assert any(message in line for line in check_spare_nodes(resolved("--spare-nodes 2", **values)))


def test_a_trainer_without_optimizer_state_is_restarted_where_its_optimizer_has_none():
    for is_stateless, mode in ((False, "off"), (True, "checkpoint")):
        args = resolved("", **SAVES, no_save_optim=True, use_stateless_adam=is_stateless)
        assert (args.trainer_recovery, args.state_copy_interval) == (mode, None)
