"""Qwen3-Next."""

from slime_plugins.models import names_of_layers

__getattr__ = names_of_layers(__name__)
