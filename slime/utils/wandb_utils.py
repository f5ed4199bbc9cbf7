"""The old path of ``slime.observability.wandb_utils``, kept for code written for it."""

from slime.observability.wandb_utils import WandbTracker

__all__ = ["WandbTracker"]
