"""The name of the weight loader under which engines of others may have it; the loader is an extension's."""

from slime.ext.fast_push.weight_receiver import receive

__all__ = ["receive"]
