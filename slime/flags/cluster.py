"""Cluster: the GPUs of the job, their division between trainer and engines, and deadlines.

Training owns ``A = actor_num_nodes * actor_num_gpus_per_node`` GPUs, the engines ``rollout_num_gpus``.  With
``--colocate`` both are the same GPUs and take turns.
"""

from __future__ import annotations

import argparse
import logging
import warnings
from argparse import Namespace
from collections.abc import Iterator
from typing import NamedTuple

from slime.algorithms.advantages import get_estimator
from slime.flags.config import BackendFlags
from slime.flags.group import FlagGroup, flag_of
from slime.flags.hub import derive_hub_names
from slime.flags.kinds import (
    gpu_count,
    minutes,
    positive_gpu_count,
    wait_s,
)
from slime.flags.rollout import OWN_ROLLOUTS, SFT_ROLLOUT
from slime.utils.errors import ConfigError

logger = logging.getLogger(__name__)


RUNTIME_FACTS = frozenset(
    {
        *("num_rollout", "num_rollout_per_epoch", "start_rollout_id", "update_weight_start_version"),
        *("rollout_num_gpus", "rollout_num_engines", "sglang_model_routers"),
        *("sglang_router_ip", "sglang_router_port", "job_secret"),
        *("run_folder", "tb_experiment_name", "wandb_run_id", "draws_bars"),
    }
)
"""Attributes known only to the running job: None until ``record_runtime`` sets them."""


class GpuPlan(NamedTuple):
    """The number of GPUs of the job, and the index of the engines' first GPU."""

    num_gpus: int
    rollout_offset: int


def plan_gpus(args: Namespace) -> GpuPlan:
    """Return the size of the placement group and the first GPU of the engines, by the mode of the run.

    With A = actor nodes x GPUs per node and R = ``--rollout-num-gpus``:

    =====================================  ============  ===============
    mode, checked in this order            GPUs          rollout offset
    =====================================  ============  ===============
    ``--debug-train-only``                 A             0
    external engines, rollout only         0             0
    external engines                       A             A
    ``--debug-rollout-only``               R             0
    ``--colocate``                         max(A, R)     0
    otherwise (disaggregated)              A + R         A
    =====================================  ============  ===============
    """
    actor_gpus = args.actor_num_nodes * args.actor_num_gpus_per_node
    rollout_gpus = args.rollout_num_gpus or 0
    if args.debug_train_only:
        return GpuPlan(actor_gpus, 0)
    if args.rollout_external:
        return GpuPlan(0, 0) if args.debug_rollout_only else GpuPlan(actor_gpus, actor_gpus)
    if args.debug_rollout_only:
        return GpuPlan(rollout_gpus, 0)
    if args.colocate:
        return GpuPlan(max(actor_gpus, rollout_gpus), 0)
    return GpuPlan(actor_gpus + rollout_gpus, actor_gpus)


def add_cluster_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the cluster group to ``parser``; ``runs_here`` is False for a run that is only planned here."""
    parser.set_defaults(runs_here=True, spare_nodes=0)
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
    group.add_argument(
        "--offload",
        action=argparse.BooleanOptionalAction,
        help="Sets --offload-train and --offload-rollout, unless they are given themselves.",
    )
    group.add_argument(
        "--offload-train",
        action=argparse.BooleanOptionalAction,
        help="Offload the trainer's GPU memory while engines generate. Default: on with --colocate, else off.",
    )
    group.add_argument(
        "--offload-train-if-needed",
        action="store_true",
        help="With --offload-train: keep the trainer on the GPU if the engines fit beside it, which is measured after "
        "each rollout. Needs --sglang-mem-fraction-static.",
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
    _add_deadlines(group)


def _add_deadlines(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--distributed-timeout-minutes", type=minutes, default=10, help="Minutes before a collective operation fails."
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
        default=600.0,
        help="Seconds that a plug-in may block the event loop of the rollout (a generate function or grader that does "
        "not await) before the run ends with an error that names it. The log names it after 10 s.",
    )
    group.add_argument(
        "--train-timeout-s", type=wait_s, default=21600.0, help="Seconds one training step, save or load may take."
    )
    group.add_argument(
        "--weight-update-timeout-s", type=wait_s, default=1800.0, help="Seconds one weight push may take."
    )
    group.add_argument(
        "--shutdown-timeout-s",
        type=wait_s,
        default=20.0,
        help="Seconds that engines, routers and trainers get to exit before they are killed.",
    )


NODE_GPUS = 8
"""GPUs per node with --debug-rollout-only, which fills a node before it uses another."""


def has_cuda() -> bool:
    """Return True if this process can use a CUDA GPU."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.cuda.is_available()


def is_for_cuda(runs_here: bool) -> bool:
    """Return True if the run has GPUs; a run that is only planned here always has."""
    return has_cuda() or not runs_here


def derive_roles(args: Namespace) -> None:
    """Derive whether the job has engines, a trainer and a critic, which has the actor's size."""
    for name in RUNTIME_FACTS - vars(args).keys():
        setattr(args, name, None)
    args.rollout_external = args.rollout_external_engine_addrs is not None
    if args.load_debug_rollout_data is not None and args.debug_train_only is False:
        raise ConfigError(
            "--debug-train-only is false, and --load-debug-rollout-data trains on written rollouts without an engine; "
            "drop one of them."
        )
    args.debug_train_only = bool(args.debug_train_only) or args.load_debug_rollout_data is not None
    args.use_critic = get_estimator(args.advantage_estimator).needs_values
    args.critic_num_nodes = args.actor_num_nodes
    args.critic_num_gpus_per_node = args.actor_num_gpus_per_node


def derive_for_extensions(args: Namespace) -> None:
    """Set the defaults of attributes that extensions change."""
    args.engine_plugins, args.weight_loaders, args.engine_settings = [], [], {}
    args.push_sends_model = True  # False: the engines' weights stay those of --hf-checkpoint
    args.reference_in_actor = False  # True: the actor's frozen weights serve as the reference
    args.restarts_trainer = False
    args.lr_factors = {}  # pattern of parameter names -> factor of their learning rates
    args.tower_dims = None  # fields of TowerDims, if the model has a vision tower
    # Secrets that were moved from the environment to the flags: model-written code could read them in any process.
    args.driver_variables = []
    args.state_copy_interval = None  # rollouts between two copies of a rank's state that outlive it


def derive_cluster(args: Namespace) -> None:
    """Derive the division of GPUs, and which side offloads while the other works; removes ``offload``."""
    if args.distributed_backend is None:
        args.distributed_backend = "nccl" if is_for_cuda(args.runs_here) else "gloo"
    for side in ("offload_train", "offload_rollout"):
        if getattr(args, side) is None:
            setattr(args, side, args.offload)
    del args.offload
    if args.use_critic and args.offload_train is False and not args.debug_rollout_only:
        logger.warning(
            "--offload-train is on although false is given for it: --advantage-estimator %s has a critic, which takes "
            "turns with the actor on the same GPUs.",
            args.advantage_estimator,
        )
        args.offload_train = True
    trainer_gpus = args.actor_num_nodes * args.actor_num_gpus_per_node
    if args.debug_rollout_only:  # the engines get the trainer's GPUs; nothing is shared or offloaded
        if args.colocate and args.rollout_num_gpus is None and not args.rollout_external:
            args.rollout_num_gpus = trainer_gpus
        if args.rollout_num_gpus is not None:
            args.actor_num_gpus_per_node = min(NODE_GPUS, args.rollout_num_gpus)
            args.actor_num_nodes = args.rollout_num_gpus // max(args.actor_num_gpus_per_node, 1)
        args.colocate = args.offload_train = args.offload_rollout = False
    if args.debug_train_only:  # there are no engines to make room for
        args.rollout_num_gpus = args.rollout_num_gpus or 0
        args.offload_train = bool(args.offload_train or args.use_critic)
        args.offload_rollout = False
    if args.colocate and args.rollout_num_gpus is None:
        args.rollout_num_gpus = trainer_gpus
    if args.offload_train is None:
        args.offload_train = args.colocate or args.use_critic
    if args.offload_rollout is None:
        args.offload_rollout = args.colocate
    if args.offload_train:
        args.disable_grad_buffers_cpu_backup = True
        args.disable_param_buffers_cpu_backup = True


def check_gpus(args: Namespace) -> Iterator[str]:
    """Yield one message per invalid number of GPUs or nodes."""
    actor_gpus = args.actor_num_nodes * args.actor_num_gpus_per_node
    if actor_gpus == 0 and not args.debug_rollout_only:
        yield (
            f"--actor-num-nodes {args.actor_num_nodes} times --actor-num-gpus-per-node {args.actor_num_gpus_per_node} "
            "leaves no GPU to train on; both must be at least 1, except with --debug-rollout-only."
        )
    if args.debug_train_only:
        return
    if args.rollout_num_gpus is None:
        if args.rollout_function_path == SFT_ROLLOUT and not args.eval_datasets:
            yield "--rollout-num-gpus is not given; sft_rollout needs no engines: give --debug-train-only."
        else:
            yield "--rollout-num-gpus is not given: say how many GPUs the engines get, or share them with --colocate."
        return
    if args.offload_train_if_needed and (args.use_critic or not args.offload_train):
        yield (
            "--offload-train-if-needed is for a trainer without a critic that sleeps while engines generate "
            "(--offload-train; the default with --colocate); drop it."
        )
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
    per_engine, is_uniform = args.rollout_num_gpus_per_engine, BackendFlags.of(args).sglang_config is None
    if is_uniform and args.rollout_num_gpus % per_engine:
        yield (
            f"--rollout-num-gpus {args.rollout_num_gpus} is not a multiple of --rollout-num-gpus-per-engine "
            f"{per_engine}: GPUs would be left over."
        )
    if is_uniform and args.colocate and args.rollout_num_gpus > actor_gpus and actor_gpus % per_engine:
        yield (
            f"--rollout-num-gpus-per-engine {per_engine} with --colocate: engines take {per_engine} GPUs each from "
            f"the first on, and the trainer's {actor_gpus} GPUs end in the middle of one. With --rollout-num-gpus "
            f"{args.rollout_num_gpus}, which goes beyond them, {per_engine} must divide {actor_gpus}."
        )
    if per_engine > args.num_gpus_per_node and per_engine % args.num_gpus_per_node:
        yield (
            f"--rollout-num-gpus-per-engine {per_engine} is no whole number of nodes of --num-gpus-per-node "
            f"{args.num_gpus_per_node} GPUs; an engine over several nodes takes all of their GPUs."
        )


def advise_idle_gpus(args: Namespace) -> None:
    """Log GPUs whose engines idle while the trainer works."""
    trainer = args.actor_num_nodes * args.actor_num_gpus_per_node
    if args.colocate and (args.rollout_num_gpus or 0) > trainer:
        logger.warning(
            "--rollout-num-gpus %d is more than the trainer's %d, which --colocate shares: the other %d have engines "
            "only, and stay idle while the trainer works. Drop --rollout-num-gpus if that is not meant.",
            args.rollout_num_gpus,
            trainer,
            args.rollout_num_gpus - trainer,
        )


_NOT_WITH = {
    "train_async.py": {
        "colocate": "trains while it generates: give the engines their own GPUs with --rollout-num-gpus",
        "offload_rollout": "trains while it generates: drop it (and --offload, which stands for it)",
    },
    "train.py": {
        "eval_in_background": "takes one step after the other: drop it",
        "keep_old_actor": "trains the weights that generated the rollout, not later ones: drop it",
    },
}
"""Program -> flags that its loop does not support, and why."""


def check_loop(args: Namespace, program: str) -> None:
    """Reject flags that the loop of ``train.py`` or ``train_async.py`` does not support.

    Raises:
        ConfigError: names the flag.
    """
    (other,) = _NOT_WITH.keys() - {program}
    for name, reason in _NOT_WITH[program].items():
        if getattr(args, name):
            raise ConfigError(f"{flag_of(name)} does not work with {program}, which {reason}, or use {other}.")
    has_answers = args.load_debug_rollout_data is not None or args.num_rollout == 0
    if args.debug_train_only and args.rollout_function_path in OWN_ROLLOUTS and not has_answers:
        raise ConfigError(
            f"--debug-train-only starts no engines, and --rollout-function-path {args.rollout_function_path} asks "
            f"them: give --load-debug-rollout-data, or {SFT_ROLLOUT} for answers that are in the data."
        )


GROUP = FlagGroup(
    add_cluster_arguments,
    derive=(derive_hub_names, derive_roles, derive_for_extensions, derive_cluster),
    check=(check_gpus,),
    advise=(advise_idle_gpus,),
)
