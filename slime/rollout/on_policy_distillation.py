"""The public path of ``slime.ext.distill.engine_teacher``."""

from slime.ext.distill.engine_teacher import post_process_rewards, reward_func

__all__ = ["post_process_rewards", "reward_func"]
