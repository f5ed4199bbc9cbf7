"""The names of upstream's ``slime.ray.placement_group``, from which its ``train.py`` builds a job.

For drivers written against them; ``train.py`` here goes through ``slime.ray.train_loop``.
"""

from slime.ray.gpus import create_placement_groups
from slime.ray.startup import create_rollout_manager, create_training_models

__all__ = ["create_placement_groups", "create_rollout_manager", "create_training_models"]
