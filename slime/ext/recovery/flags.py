"""Flags for restarts: of a trainer whose ranks die, after the loss of nodes, and of the driver."""

from __future__ import annotations

import argparse
from argparse import Namespace
from collections.abc import Iterator

from slime.flags.group import FlagGroup
from slime.flags.kinds import non_negative_int, positive_int, wait_s_or_zero
from slime.flags.train import keeps_moments


def add_recovery_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the recovery group to ``parser``."""
    group = parser.add_argument_group("recovery", "Restarts of the trainer and of the driver.")
    group.add_argument(
        "--trainer-recovery",
        choices=["off", "checkpoint", "memory"],
        help="What happens when a trainer rank dies: off ends the run; checkpoint restarts the trainer from its last "
        "checkpoint and repeats training on later rollouts, while engines stay up; memory does so from copies of "
        "every rank's state in the memory of its host and of another node, or from the checkpoint if those are lost. "
        "Default: checkpoint with --save and --save-interval.",
    )
    group.add_argument(
        "--memory-checkpoint-interval",
        type=positive_int,
        help="Rollouts between two copies of --trainer-recovery memory. Training on up to this many rollouts is "
        "repeated after a death, or on twice as many if it happens while a copy is being sent. Default: 1.",
    )
    group.add_argument(
        "--max-recoveries",
        type=non_negative_int,
        default=3,
        help="Restarts of the trainer allowed within an hour, and likewise of the driver with --supervise; one more "
        "failure ends the run.",
    )
    group.add_argument(
        "--spare-nodes",
        type=non_negative_int,
        default=0,
        help="Nodes of --actor-num-gpus-per-node GPUs kept in reserve: if a node of the trainer dies and is not back "
        "within 10 s, its ranks restart there. 0: they wait for the node, up to --cluster-wait-timeout-s.",
    )
    group.add_argument(
        "--preemption-grace-s",
        type=wait_s_or_zero,
        default=0.0,
        help="Seconds after SIGTERM to the driver or a trainer rank to finish and save the trainer's step before the "
        "job exits, or continues without that node. 0: it exits at once.",
    )
    group.add_argument(
        "--supervise",
        action="store_true",
        help="Watch the driver from another process and restart it if it fails; it resumes from the last save.",
    )


def derive_recovery(args: Namespace) -> None:
    """Enable trainer restarts by default if the run writes checkpoints to resume from."""
    if args.trainer_recovery is None:
        has_state = not (args.no_save_optim and keeps_moments(args))
        resumes = args.save is not None and args.save_interval is not None and has_state
        args.trainer_recovery = "checkpoint" if resumes else "off"
    if args.trainer_recovery == "memory" and args.memory_checkpoint_interval is None:
        args.memory_checkpoint_interval = 1
    args.restarts_trainer = args.trainer_recovery != "off"
    args.state_copy_interval = args.memory_checkpoint_interval if args.trainer_recovery == "memory" else None


def check_trainer_recovery(args: Namespace) -> Iterator[str]:
    """Yield a message if the trainer could not be restarted."""
    if args.restarts_trainer and args.no_save_optim and keeps_moments(args):
        yield "A trainer restarts with its optimizer's state; drop --no-save-optim, or use --trainer-recovery off."


_CHECKPOINT = "the trainer restarts from a checkpoint, also if its copies are lost"
GROUP = FlagGroup(
    add_recovery_arguments,
    derive=(derive_recovery,),
    check=(check_trainer_recovery,),
    needs=(
        ("trainer_recovery=checkpoint", "save_interval", _CHECKPOINT),
        ("trainer_recovery=memory", "save_interval", _CHECKPOINT),
        ("memory_checkpoint_interval", "trainer_recovery=memory", "copies are made for that"),
        ("spare_nodes", "trainer_recovery=checkpoint trainer_recovery=memory", "nothing else starts on them"),
    ),
    excludes=(
        ("spare_nodes", "colocate", "the engines of a node die with it"),
        ("spare_nodes", "debug_rollout_only", "there is no trainer"),
    ),
)
