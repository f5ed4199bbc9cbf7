"""Cluster: which GPUs exist and who owns them, deadlines of the job, health checks of the engines.

Training owns ``A = actor_num_nodes * actor_num_gpus_per_node`` GPUs, the engines ``rollout_num_gpus``.  With
``--colocate`` both are the same GPUs and take turns.
"""

from __future__ import annotations

import argparse
import re
import warnings
from argparse import Namespace
from collections.abc import Iterator

from slime.flags.config import backend_flags
from slime.flags.kinds import (
    gpu_count,
    minutes,
    non_negative_int,
    positive_gpu_count,
    positive_int,
    wait_s,
    wait_s_or_zero,
)
from slime.flags.rollout import OWN_ROLLOUTS
from slime.utils.async_utils import STALL_TIMEOUT_S


def add_cluster_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the cluster group to ``parser``."""
    group = parser.add_argument_group("cluster", "GPUs of the trainer and of the engines, and deadlines.")
    group.add_argument("--actor-num-nodes", type=gpu_count, default=1, help="Nodes the trainer runs on.")
    group.add_argument("--actor-num-gpus-per-node", type=gpu_count, default=8, help="GPUs per node for the trainer.")
    group.add_argument(
        "--rollout-num-gpus",
        type=gpu_count,
        help="GPUs of all engines together. Default with --colocate: the trainer's GPUs. 0 starts routers only.",
    )
    group.add_argument(
        "--rollout-num-gpus-per-engine",
        type=positive_gpu_count,
        default=1,
        help="GPUs of one engine (its tensor-parallel times pipeline-parallel size).",
    )
    group.add_argument(
        "--num-gpus-per-node", type=positive_gpu_count, default=8, help="GPUs per node for the engines."
    )
    group.add_argument("--colocate", action="store_true", help="Run trainer and engines in turns on the same GPUs.")
    group.add_argument("--offload", action="store_true", help="Same as --offload-train and --offload-rollout.")
    group.add_argument(
        "--offload-train",
        action=argparse.BooleanOptionalAction,
        help="Offload the trainer's GPU memory while engines generate. Default: on with --colocate, else off.",
    )
    group.add_argument(
        "--offload-rollout",
        action=argparse.BooleanOptionalAction,
        help="Release the engines' GPU memory while the trainer works. Default: on with --colocate, else off.",
    )
    group.add_argument(
        "--distributed-backend",
        choices=["nccl", "gloo"],
        help="torch.distributed backend of the trainer. Default: nccl with CUDA, gloo without.",
    )
    group.add_argument(
        "--distributed-timeout-minutes",
        type=minutes,
        default=10,
        help="Minutes before a collective operation fails.",
    )
    group.add_argument(
        "--cluster-wait-timeout-s",
        type=wait_s,
        default=600.0,
        help="Seconds to wait until the cluster has the GPUs, before the job ends.",
    )
    group.add_argument(
        "--engine-start-timeout-s",
        type=wait_s,
        default=1800.0,
        help="Seconds from an engine's start to its first successful health check.",
    )
    group.add_argument(
        "--rollout-timeout-s", type=wait_s, default=86400.0, help="Seconds one rollout or one eval may take."
    )
    group.add_argument(
        "--loop-stall-timeout-s",
        type=wait_s,
        default=STALL_TIMEOUT_S,
        help="Seconds that a plug-in may block the event loop of the rollout (a generate function or grader that does "
        "not await) before the run ends and names it. The log names it after 10 s.",
    )
    group.add_argument(
        "--train-timeout-s",
        type=wait_s,
        default=21600.0,
        help="Seconds one training step, save or load may take.",
    )
    group.add_argument(
        "--weight-update-timeout-s", type=wait_s, default=1800.0, help="Seconds one weight push may take."
    )
    group.add_argument(
        "--shutdown-timeout-s",
        type=wait_s,
        default=20.0,
        help="Seconds for engines, routers and trainers to end before they are killed.",
    )


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
        "--supervise",
        action="store_true",
        help="Start the driver again when it fails, from a process of its own; it goes on from the last save.",
    )
    group.add_argument(
        "--preemption-grace-s",
        type=wait_s_or_zero,
        default=0.0,
        help="Seconds from SIGTERM to the driver or a trainer rank in which the trainer's step ends and is saved "
        "before the job leaves. 0: it leaves at once.",
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
        help="Seconds an engine has to answer a health check.",
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


NODE_GPUS = 8
"""GPUs of a node that --debug-rollout-only fills before it takes another."""


def has_cuda() -> bool:
    """Return True when this process can see a CUDA GPU."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.cuda.is_available()


def is_for_cuda(args: Namespace) -> bool:
    """Return True where the run has GPUs; a plan is always one of a run that has."""
    return has_cuda() or args.plan is not None


def derive_trainer_recovery(args: Namespace) -> None:
    """Restart a trainer that dies where it leaves checkpoints to go on from."""
    if args.trainer_recovery is None:
        has_state = not args.no_save_optim or args.use_stateless_adam
        goes_on = args.save is not None and args.save_interval is not None and has_state
        args.trainer_recovery = "checkpoint" if goes_on else "off"
    if args.trainer_recovery == "memory" and args.memory_checkpoint_interval is None:
        args.memory_checkpoint_interval = 1


def is_copy_due(args: Namespace, rollout_id: int) -> bool:
    """Return True when the ranks of trainer and critic copy their state after ``rollout_id``.

    With ``--trainer-recovery memory``; from the first rollout on that both have trained on.
    """
    if args.trainer_recovery != "memory" or rollout_id < args.num_critic_only_steps:
        return False
    return (rollout_id + 1) % args.memory_checkpoint_interval == 0


def derive_on_nan(args: Namespace) -> None:
    """Stop at a number that is not finite; megatron-core must not stop where the step is to be skipped."""
    if args.on_nan is None:
        args.on_nan = ["stop" if backend_flags(args).check_for_nan_in_loss_and_grad else "skip"]
    if args.on_nan[0] == "skip":
        args.check_for_nan_in_loss_and_grad = False


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


def derive_distributed_backend(args: Namespace) -> None:
    """Use NCCL with CUDA, gloo without."""
    if args.distributed_backend is None:
        args.distributed_backend = "nccl" if is_for_cuda(args) else "gloo"


def derive_cluster(args: Namespace) -> None:
    """Fill in who owns which GPUs, and which side offloads while the other works."""
    _offload_shorthand(args)
    _rollout_only_cluster(args)
    _train_only_cluster(args)
    _colocation(args)


def _offload_shorthand(args: Namespace) -> None:
    """Set both sides for --offload, and remove it."""
    if args.offload:
        args.offload_train = True
        args.offload_rollout = True
    del args.offload


def _rollout_only_cluster(args: Namespace) -> None:
    """Give the trainer's GPUs to the engines where nothing trains; nothing is shared or offloaded."""
    if not args.debug_rollout_only:
        return
    if args.colocate and args.rollout_num_gpus is None and not args.rollout_external:
        args.rollout_num_gpus = args.actor_num_nodes * args.actor_num_gpus_per_node
    if args.rollout_num_gpus is not None:
        args.actor_num_gpus_per_node = min(NODE_GPUS, args.rollout_num_gpus)
        args.actor_num_nodes = (
            args.rollout_num_gpus // args.actor_num_gpus_per_node if args.actor_num_gpus_per_node else 0
        )
    args.colocate = False
    args.offload_train = False
    args.offload_rollout = False


def _train_only_cluster(args: Namespace) -> None:
    """Offload nothing to make room for engines where there are none."""
    if args.debug_train_only:
        args.rollout_num_gpus = 0 if args.rollout_num_gpus is None else args.rollout_num_gpus
        args.offload_train = bool(args.offload_train)
        args.offload_rollout = False


def _colocation(args: Namespace) -> None:
    """Offload where GPUs are shared; separate GPUs need none of it."""
    if args.colocate:
        if args.release_train:
            args.offload_train = False
            args.offload_rollout = True
        if args.rollout_num_gpus is None:
            args.rollout_num_gpus = args.actor_num_nodes * args.actor_num_gpus_per_node
    args.offload_train = args.colocate if args.offload_train is None else args.offload_train
    args.offload_rollout = args.colocate if args.offload_rollout is None else args.offload_rollout
    if args.use_critic:
        args.offload_train = True
    if args.offload_train:
        args.disable_grad_buffers_cpu_backup = True
        args.disable_param_buffers_cpu_backup = True


def check_gpus(args: Namespace) -> Iterator[str]:
    """Yield one message for each number of GPUs or nodes that cannot work."""
    actor_gpus = args.actor_num_nodes * args.actor_num_gpus_per_node
    if actor_gpus == 0 and not args.debug_rollout_only:
        yield (
            f"--actor-num-nodes {args.actor_num_nodes} times --actor-num-gpus-per-node {args.actor_num_gpus_per_node} "
            "leaves no GPU to train on; both must be at least 1, except with --debug-rollout-only."
        )
    if args.debug_train_only:
        return
    if args.rollout_num_gpus is None:
        yield "--rollout-num-gpus is not given: say how many GPUs the engines get, or share them with --colocate."
        return
    if args.rollout_external:
        if args.colocate:
            yield (
                "--rollout-external-engine-addrs and --colocate exclude each other: the GPUs of external engines are "
                "not this job's. Drop --colocate."
            )
        return
    if args.rollout_num_gpus == 0 and args.rollout_function_path in OWN_ROLLOUTS:
        yield (
            "--rollout-num-gpus 0 leaves no GPU for the engines, which --rollout-function-path asks; give at least "
            "--rollout-num-gpus-per-engine, or share the trainer's GPUs with --colocate."
        )
    per_engine = args.rollout_num_gpus_per_engine
    if backend_flags(args).sglang_config is None and args.rollout_num_gpus % per_engine:
        yield (
            f"--rollout-num-gpus {args.rollout_num_gpus} is not a multiple of --rollout-num-gpus-per-engine "
            f"{per_engine}: GPUs would be left over."
        )
    if per_engine > args.num_gpus_per_node and per_engine % args.num_gpus_per_node:
        yield (
            f"--rollout-num-gpus-per-engine {per_engine} is no whole number of nodes of --num-gpus-per-node "
            f"{args.num_gpus_per_node} GPUs; an engine over several nodes takes all of their GPUs."
        )
