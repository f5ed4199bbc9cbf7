"""The old path of ``slime.observability.wandb_utils``, kept for code written for it."""

from slime.observability.wandb_utils import WandbTracker, run_name

__all__ = ["WandbTracker", "run_name"]
