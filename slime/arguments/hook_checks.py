"""The old path of ``slime.flags.hook_checks``."""

from slime.flags.hook_checks import check_import

__all__ = ["check_import"]
