"""The old path of ``slime.flags.parse``, for programs that use slime as a library."""

from slime.flags.parse import (
    args_to_resume,
    get_slime_extra_args_provider,
    parse_args,
    record_runtime,
    reset_arg,
    slime_validate_args,
)

__all__ = [
    "args_to_resume",
    "get_slime_extra_args_provider",
    "parse_args",
    "record_runtime",
    "reset_arg",
    "slime_validate_args",
]
