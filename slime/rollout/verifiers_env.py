"""The public path of ``slime.ext.agent.verifiers_env``."""

from slime.ext.agent.verifiers_env import generate

__all__ = ["generate"]
