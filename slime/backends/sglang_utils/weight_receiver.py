"""Import path of the weight loader for external engines; an extension implements the loader."""

from slime.ext.fast_push.weight_receiver import receive

__all__ = ["receive"]
