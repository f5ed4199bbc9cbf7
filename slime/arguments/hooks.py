"""The old path of ``slime.flags.hooks``."""

from slime.flags.hooks import HOOKS, Hook

__all__ = ["HOOKS", "Hook"]
