"""The old path of ``slime.ext.agent.session``."""

from slime.ext.agent.session import TURN_TIMEOUT_S, adapter_options, play, stop_servers

__all__ = ["TURN_TIMEOUT_S", "adapter_options", "play", "stop_servers"]
