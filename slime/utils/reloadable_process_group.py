"""Old path of ``slime.backends.megatron_utils.reloadable_groups``."""

from slime.backends.megatron_utils.reloadable_groups import (
    ReloadableProcessGroup,
    make_groups_reloadable,
    release_communicators,
)

__all__ = ["ReloadableProcessGroup", "make_groups_reloadable", "release_communicators"]
