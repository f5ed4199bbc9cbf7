"""Starts the parts of a job: the rollout manager with its engines, then the trainers.

Drivers written for upstream call similar functions in ``slime.ray.placement_group``.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import Any

from slime.flags.algorithm import uses_reference
from slime.flags.parse import record_runtime
from slime.observability.telemetry import values_of_the_run
from slime.ray.actor_group import RayTrainGroup
from slime.ray.engines.deadlines import memory_timeout_s, restart_timeout_s
from slime.ray.gpus import GpuSlice
from slime.ray.parts import CORE, Parts
from slime.ray.rollout import start_rollout_manager
from slime.ray.trainers import create_critic
from slime.ray.utils import cluster_has_accelerators
from slime.ray.waiting import wait_for, watch, watch_start
from slime.utils.errors import ConfigError

ENGINE_START_MARGIN_S = 180.0
"""Seconds to wait for the engines beyond their own start deadline."""


MANAGER = "the rollout manager"
"""The manager's name in messages."""


def create_rollout_manager(
    args: Namespace, pg: GpuSlice, meanwhile: Callable[[], None] | None = None, parts: Parts = CORE
) -> tuple[Any, int | None]:
    """Start the rollout manager.  Engines start in the background; if one fails, every later wait raises its error.

    Sets ``args.num_rollout`` if only ``--num-epoch`` is given.  If engines share real GPUs with the trainer, this
    returns only once they are up and have released their memory (:func:`engines_come_first`).

    Args:
        args: the run's arguments.
        pg: the engines' GPUs.
        meanwhile: called once while the engines start.
        parts: the run's implementations.

    Returns:
        the manager's actor handle, and the number of rollouts per pass over the prompts (None without a data set).
    """
    record_runtime(args, **values_of_the_run(), draws_bars=sys.stderr.isatty())
    manager = start_rollout_manager(args, pg, parts)
    watch(manager, MANAGER)
    watch_start(manager.wait_ready.remote(), "the engines to start")
    if meanwhile is not None:
        meanwhile()
    per_epoch: int | None = wait_for(
        manager.get_num_rollout_per_epoch.remote(), what="the rollout manager to start", timeout_s=args.train_timeout_s
    )
    if args.num_rollout is None:
        num_rollout = (per_epoch or 0) * args.num_epoch
        if num_rollout == 0:
            raise ConfigError(
                f"--num-epoch {args.num_epoch} gives no rollout: the data set has fewer prompts than "
                f"--rollout-batch-size {args.rollout_batch_size}. Use a smaller batch, more data or --num-rollout."
            )
        record_runtime(args, num_rollout=num_rollout)
    if engines_come_first(args):
        # Engines size their memory by what is free, so they must be up before the trainer takes any (create).
        wait_for_engines(manager, args.engine_start_timeout_s)
        timeout_s = memory_timeout_s(args.engine_start_timeout_s, args.weight_update_timeout_s)
        wait_for(manager.offload.remote(), what="the engines' memory (offload)", timeout_s=timeout_s)
    return manager, per_epoch


def make_actor(args: Namespace, gpus: GpuSlice, parts: Parts) -> RayTrainGroup:
    """Return the actor's group without starting anything; with ``--debug-rollout-only`` it has no ranks."""
    if args.debug_rollout_only:
        return RayTrainGroup(args, 0, 0, gpus)
    group = parts.train_group.load() if parts.train_group is not None else RayTrainGroup
    made: RayTrainGroup = group(
        args,
        args.actor_num_nodes,
        args.actor_num_gpus_per_node,
        gpus,
        role="actor",
        with_ref=uses_reference(args.use_kl_loss, args.kl_coef),
        parts=parts,
    )
    return made


def create_training_models(
    args: Namespace,
    pgs: Mapping[str, GpuSlice | None],
    rollout_manager: Any,
    actor: RayTrainGroup,
) -> tuple[RayTrainGroup, RayTrainGroup | None]:
    """Start the trainers, load their models, and wait for the engines.

    Sets ``args.start_rollout_id`` if no flag does.

    Returns:
        the actor, and the critic or None.
    """
    critic = None
    if args.debug_rollout_only:
        record_runtime(args, start_rollout_id=args.start_rollout_id or 0)
    else:
        start_rollout_id = actor.create()
        if args.critic_args is not None and args.num_rollout != 0:
            critic_gpus = pgs["critic"]
            assert critic_gpus is not None
            critic = create_critic(args, critic_gpus, actor)
        if args.start_rollout_id is None:
            record_runtime(args, start_rollout_id=start_rollout_id)
        actor.set_rollout_manager(rollout_manager)
        load_position(args, rollout_manager, args.start_rollout_id)
    if not engines_come_first(args):
        wait_for_engines(rollout_manager, args.engine_start_timeout_s)
    return actor, critic


def load_position(args: Namespace, manager: Any, start_rollout_id: int) -> None:
    """Have the manager restore the data position at which ``start_rollout_id`` begins."""
    if args.rollout_global_dataset:
        position = manager.load.remote(start_rollout_id - 1)
        wait_for(position, what="the position in the data to be restored", timeout_s=args.train_timeout_s)


def save_position(args: Namespace, manager: Any, rollout_id: int) -> None:
    """Have the manager write the data position after ``rollout_id``, with the sample buffer."""
    if args.rollout_global_dataset:
        position = manager.save.remote(rollout_id)
        wait_for(position, what="the position in the data to be saved", timeout_s=args.train_timeout_s)


def engines_come_first(args: Namespace) -> bool:
    """Return whether engines must start before the trainer, because they size their memory by what is free."""
    return bool(args.offload_rollout) and not args.debug_train_only and cluster_has_accelerators()


def wait_for_engines(manager: Any, engine_start_timeout_s: float) -> None:
    """Wait until every engine serves."""
    timeout_s = restart_timeout_s(engine_start_timeout_s) + ENGINE_START_MARGIN_S
    wait_for(manager.wait_ready.remote(), what="the engines to start", timeout_s=timeout_s)
