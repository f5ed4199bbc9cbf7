"""Old path of ``slime.backends.megatron_utils.routing_replay``."""

from slime.backends.megatron_utils.routing_replay import RoutingReplay

__all__ = ["RoutingReplay"]
