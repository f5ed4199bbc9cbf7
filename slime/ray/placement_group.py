"""The names of upstream's ``slime.ray.placement_group``, from which its ``train.py`` builds a job.

For drivers written against them; ``train.py`` here goes through ``slime.ray.train_loop``.
"""

from argparse import Namespace

from slime.arguments.validate_files import check_contents
from slime.ray import gpus
from slime.ray.startup import create_rollout_manager, create_training_models

__all__ = ["create_placement_groups", "create_rollout_manager", "create_training_models"]


def create_placement_groups(args: Namespace) -> dict[str, gpus.GpuSlice | None]:
    """Compare the files of model and checkpoints with what these say of them, then reserve every GPU of the job.

    Raises:
        DataError: a file is missing, cut or damaged.
        ConfigError: as ``slime.ray.gpus`` says.
    """
    check_contents(args)
    return gpus.create_placement_groups(args)
