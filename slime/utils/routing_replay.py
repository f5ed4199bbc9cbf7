"""The old path of ``slime.backends.megatron_utils.routing_replay``, kept for code written for it."""

from slime.backends.megatron_utils.routing_replay import RoutingReplay

__all__ = ["RoutingReplay"]
