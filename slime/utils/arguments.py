"""Old path of ``slime.flags.parse``, for drivers written for upstream; includes the flags of extensions."""

from argparse import Namespace

from slime.compose import flag_groups, parse_args
from slime.flags import critic, parse
from slime.flags.parse import AddArguments, parser_of, reset_arg

__all__ = [
    "get_slime_extra_args_provider",
    "parse_args",
    "parse_megatron_role_args",
    "reset_arg",
    "slime_validate_args",
]


def get_slime_extra_args_provider(add_custom_arguments: AddArguments | None = None) -> AddArguments:
    """Return a function that adds slime's own flags, then the caller's, to a parser and returns it."""
    return parse.get_slime_extra_args_provider(add_custom_arguments, groups=flag_groups())


def slime_validate_args(args: Namespace) -> None:
    """Derive missing values of ``args``, which holds flags as given, and check them."""
    parse.slime_validate_args(args, parser_of(args, flag_groups()))


def parse_megatron_role_args(args: Namespace, megatron_config_path: str | None, role: str) -> Namespace:
    """Return the args of a role; see :func:`slime.flags.critic.parse_megatron_role_args`."""
    return critic.parse_megatron_role_args(args, megatron_config_path, role, parser_of(args, flag_groups()))
