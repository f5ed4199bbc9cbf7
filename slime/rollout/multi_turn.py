"""The public path of ``slime.ext.environments.multi_turn``."""

from slime.ext.environments.multi_turn import EnvironmentFailure, TextEnvironment, converse, generate, observation_text

__all__ = ["EnvironmentFailure", "TextEnvironment", "converse", "generate", "observation_text"]
