"""The names in upstream's ``slime.ray.placement_group``, from which upstream's ``train.py`` builds a job.

Provided for drivers written against upstream; this repository's ``train.py`` uses ``slime.compose.start_job``.
"""

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from slime.compose import parts
from slime.flags.files import check_contents
from slime.ray import gpus, startup
from slime.ray.actor_group import RayTrainGroup

__all__ = ["create_placement_groups", "create_rollout_manager", "create_training_models"]


def create_placement_groups(args: Namespace) -> dict[str, gpus.GpuSlice | None]:
    """Check that model and checkpoint files match their indexes, then reserve all GPUs of the job.

    Raises:
        DataError: a file is missing, truncated or damaged.
        ConfigError: see ``slime.ray.gpus.create_placement_groups``.
    """
    check_contents(args)
    return gpus.create_placement_groups(args)


def create_rollout_manager(args: Namespace, pg: gpus.GpuSlice) -> tuple[Any, int | None]:
    """Start the rollout manager with the parts that the flags select; see ``slime.ray.startup``."""
    return startup.create_rollout_manager(args, pg, parts=parts(args))


def create_training_models(
    args: Namespace, pgs: Mapping[str, gpus.GpuSlice | None], rollout_manager: Any
) -> tuple[RayTrainGroup, RayTrainGroup | None]:
    """Start the trainers with the parts that the flags select; see ``slime.ray.startup``."""
    actor_gpus = pgs["actor"]
    assert actor_gpus is not None
    actor = startup.make_actor(args, actor_gpus, parts(args))
    return startup.create_training_models(args, pgs, rollout_manager, actor)
