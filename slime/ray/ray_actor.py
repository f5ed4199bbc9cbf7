"""What every Ray actor of slime can say of its node."""

from __future__ import annotations

import random

from slime.utils.net import get_current_node_ip, get_free_port


class RayActor:
    """Base of actors that others must reach over the network."""

    @staticmethod
    def _get_current_node_ip_and_free_port(start_port: int = 10000, consecutive: int = 1) -> tuple[str, int]:
        """This node's address and the first of ``consecutive`` free ports at or above ``start_port``."""
        return get_current_node_ip(), get_free_port(start_port=start_port, consecutive=consecutive)

    def get_master_addr_and_port(self) -> tuple[str, int]:
        """Address and port for the rendezvous of torch.distributed, on this actor's node."""
        return self._get_current_node_ip_and_free_port(start_port=random.randint(20000, 21000))
