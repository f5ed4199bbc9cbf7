"""The old path of ``slime.arguments``, for drivers written for upstream."""

from slime.arguments import get_slime_extra_args_provider, parse_args, reset_arg, slime_validate_args
from slime.arguments.critic import parse_megatron_role_args

__all__ = [
    "get_slime_extra_args_provider",
    "parse_args",
    "parse_megatron_role_args",
    "reset_arg",
    "slime_validate_args",
]
