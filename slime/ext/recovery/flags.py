"""Flags of restarts: of a trainer whose ranks die, of nodes that are taken away, of the driver."""

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
        help="What happens when a trainer rank dies: off ends the run; checkpoint starts the trainer again from its "
        "last checkpoint and trains again on the rollouts since, while engines stay up; memory does so from copies of "
        "every rank's state in the memory of its host and of another node's, and from the checkpoint where those are "
        "lost. Default: checkpoint with --save and --save-interval.",
    )
    group.add_argument(
        "--memory-checkpoint-interval",
        type=positive_int,
        help="Rollouts between two copies of --trainer-recovery memory, which are trained again after a death; twice "
        "as many when it comes while a copy is on its way. Default: 1.",
    )
    group.add_argument(
        "--max-recoveries",
        type=non_negative_int,
        default=3,
        help="Restarts of the trainer within an hour, and those of --supervise; one more failure ends the run.",
    )
    group.add_argument(
        "--spare-nodes",
        type=non_negative_int,
        default=0,
        help="Nodes of --actor-num-gpus-per-node GPUs that are kept in reserve: the trainer's ranks of a node that "
        "died and does not come back within 10 s start again there. 0: they wait for the node, for "
        "--cluster-wait-timeout-s.",
    )
    group.add_argument(
        "--preemption-grace-s",
        type=wait_s_or_zero,
        default=0.0,
        help="Seconds from SIGTERM to the driver or a trainer rank in which the trainer's step ends and is saved "
        "before the job leaves, or goes on without that node. 0: it leaves at once.",
    )
    group.add_argument(
        "--supervise",
        action="store_true",
        help="Start the driver again when it fails, from a process of its own; it goes on from the last save.",
    )


def derive_recovery(args: Namespace) -> None:
    """Restart a trainer that dies, where it leaves checkpoints to go on from."""
    if args.trainer_recovery is None:
        has_state = not (args.no_save_optim and keeps_moments(args))
        resumes = args.save is not None and args.save_interval is not None and has_state
        args.trainer_recovery = "checkpoint" if resumes else "off"
    if args.trainer_recovery == "memory" and args.memory_checkpoint_interval is None:
        args.memory_checkpoint_interval = 1
    args.restarts_trainer = args.trainer_recovery != "off"
    args.state_copy_interval = args.memory_checkpoint_interval if args.trainer_recovery == "memory" else None


def check_trainer_recovery(args: Namespace) -> Iterator[str]:
    """Yield a message for a trainer that nothing could restart."""
    if args.restarts_trainer and args.no_save_optim and keeps_moments(args):
        yield "A trainer restarts with its optimizer's state; drop --no-save-optim, or use --trainer-recovery off."


_CHECKPOINT = "the trainer restarts from a checkpoint, also where its copies are lost"
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
