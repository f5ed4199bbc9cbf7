"""Builds the model's config from the flags, under its name in ``megatron.training.arguments``."""

from slime.backends.megatron_utils.flags.config_builders import (
    transformer_config_from_args as core_transformer_config_from_args,
)

__all__ = ["core_transformer_config_from_args"]
