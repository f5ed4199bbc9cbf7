"""Fault tolerance: health checks of the engines, restarts of engines and trainer, numbers that are not finite."""

from __future__ import annotations

import argparse
import re
from argparse import Namespace
from collections.abc import Iterator

from slime.flags.config import backend_flags
from slime.flags.group import FlagGroup
from slime.flags.kinds import non_negative_int, positive_int, wait_s, wait_s_or_zero


def add_fault_tolerance_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the fault tolerance group to ``parser``."""
    group = parser.add_argument_group("fault tolerance", "Health checks, and restarts of engines and of the trainer.")
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
        "--trainer-hang-timeout-s",
        type=wait_s,
        default=30.0,
        help="A trainer rank hangs when it does not answer for so many seconds, or when a micro-batch or optimizer "
        "step takes so many beyond twice the longest before; it is then treated like one that died.",
    )
    group.add_argument(
        "--preemption-grace-s",
        type=wait_s_or_zero,
        default=0.0,
        help="Seconds from SIGTERM to the driver or a trainer rank in which the trainer's step ends and is saved "
        "before the job leaves, or goes on without that node. 0: it leaves at once.",
    )
    group.add_argument(
        "--on-nan",
        nargs="+",
        metavar="stop|skip|rollback N",
        help="What happens when a loss or gradient is not finite: stop ends the run; skip leaves the step out and "
        "counts it (train/skipped_steps); rollback N leaves the rollout out and goes back N checkpoints, also when "
        "ranks that must hold the same weights do not, which otherwise ends the run. Default: stop; skip with "
        "--no-check-for-nan-in-loss-and-grad.",
    )
    _add_engine_checks(group)


def _add_engine_checks(group: argparse._ArgumentGroup) -> None:
    """Add the flags of engines' health."""
    group.add_argument(
        "--use-fault-tolerance", action="store_true", help="Check the engines' health and restart failed ones."
    )
    group.add_argument(
        "--rollout-health-check-interval",
        type=wait_s,
        default=30.0,
        help="Seconds between two health checks of an engine.",
    )
    group.add_argument(
        "--rollout-health-check-timeout",
        type=wait_s,
        default=30.0,
        help="Seconds an engine has to answer a health check, and a prefill engine to get its half of a request.",
    )
    group.add_argument(
        "--rollout-health-check-first-wait",
        type=wait_s_or_zero,
        default=0.0,
        help="Seconds without health checks after engines start or resume.",
    )
    group.add_argument(
        "--rollout-stall-timeout-s",
        type=wait_s_or_zero,
        default=600.0,
        help="Without fault tolerance: the run ends when an engine that is generating gives no token for so many "
        "seconds. 0: never.",
    )


def derive_fault_tolerance(args: Namespace) -> None:
    """Restart a trainer that dies where it leaves checkpoints to go on from; stop at a number that is not finite."""
    if args.trainer_recovery is None:
        has_state = not args.no_save_optim or args.use_stateless_adam
        goes_on = args.save is not None and args.save_interval is not None and has_state
        args.trainer_recovery = "checkpoint" if goes_on else "off"
    if args.trainer_recovery == "memory" and args.memory_checkpoint_interval is None:
        args.memory_checkpoint_interval = 1
    if args.on_nan is None:
        args.on_nan = ["stop" if backend_flags(args).check_for_nan_in_loss_and_grad else "skip"]
    if args.on_nan[0] == "skip":
        args.check_for_nan_in_loss_and_grad = False  # megatron-core must not stop where the step is to be skipped


def is_copy_due(args: Namespace, rollout_id: int) -> bool:
    """Return True when the ranks of trainer and critic copy their state after ``rollout_id``.

    With ``--trainer-recovery memory``; from the first rollout on that both have trained on.
    """
    if args.trainer_recovery != "memory" or rollout_id < args.num_critic_only_steps:
        return False
    return (rollout_id + 1) % args.memory_checkpoint_interval == 0


def checkpoints_to_go_back(args: Namespace) -> int:
    """Return N of ``--on-nan rollback N``; 0 where nothing is rolled back."""
    return int(args.on_nan[1]) if args.on_nan[0] == "rollback" else 0


def check_on_nan(args: Namespace) -> Iterator[str]:
    """Yield one message for each thing that is wrong with --on-nan."""
    given = " ".join(args.on_nan)
    if re.fullmatch(r"stop|skip|rollback [1-9][0-9]{0,3}", given) is None:
        yield f"--on-nan {given} is none of stop, skip and rollback N (such as: rollback 1)."
        return
    if given != "skip" and not backend_flags(args).check_for_nan_in_loss_and_grad:
        yield f"--no-check-for-nan-in-loss-and-grad finds nothing for --on-nan {given}; drop one of them."
    back = checkpoints_to_go_back(args)
    if back and args.trainer_recovery == "off":
        yield f"--on-nan {given} goes back by --trainer-recovery checkpoint; give that, or use stop or skip."
    if back and args.keep_last is not None and args.keep_last < back:
        yield f"--on-nan {given} needs as many checkpoints, and --keep-last is {args.keep_last}; raise it."


def check_trainer_recovery(args: Namespace) -> Iterator[str]:
    """Yield one message for each flag without which a trainer cannot be restarted."""
    mode, every = args.trainer_recovery, args.memory_checkpoint_interval
    if mode != "memory" and every is not None:
        yield f"--memory-checkpoint-interval {every} is of --trainer-recovery memory, which is {mode}; drop one."
    if mode == "off":
        return
    if args.save is None or args.save_interval is None:
        fallback = "where its copies are lost it " if mode == "memory" else ""
        yield (
            f"--trainer-recovery {mode}: {fallback}restarts from a checkpoint; give --save and --save-interval, or "
            "use off."
        )
    if args.no_save_optim and not args.use_stateless_adam:
        yield f"--trainer-recovery {mode} needs the optimizer's state; drop --no-save-optim, or use off."
    if mode == "memory" and args.release_train:
        yield "--trainer-recovery memory: --release-train saves every rollout, and its ranks end; use checkpoint."


def check_spare_nodes(args: Namespace) -> Iterator[str]:
    """Yield one message for each mode in which nobody would take the GPUs in reserve."""
    if not args.spare_nodes:
        return
    for reason, holds in (
        ("--trainer-recovery off starts nothing on them", args.trainer_recovery == "off"),
        ("with --colocate the engines of a node die with it", args.colocate),
        ("--release-train takes its GPUs anew for each rollout", args.release_train),
        ("--debug-rollout-only has no trainer", args.debug_rollout_only),
    ):
        if holds:
            yield f"--spare-nodes {args.spare_nodes}: {reason}; drop one of them."


GROUP = FlagGroup(
    add_fault_tolerance_arguments,
    derive=(derive_fault_tolerance,),
    check=(check_trainer_recovery, check_spare_nodes, check_on_nan),
)
