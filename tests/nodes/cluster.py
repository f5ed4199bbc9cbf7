"""Several Ray nodes on this machine: each has its own address and logical GPUs.

The head has the machine's address, which Ray requires; the others are at 127.0.0.2 and up.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import ray
from ray._private.authentication.authentication_token_setup import ensure_token_if_auth_enabled
from ray._private.node import Node
from ray._raylet import Config  # type: ignore[attr-defined]
from ray.cluster_utils import Cluster

from slime.utils.net import get_current_node_ip

OBJECT_STORE_BYTES = 80_000_000
ENVIRONMENT = {
    # A process keeps the mode of its first cluster, and Ray's own default for a private one is "token".
    "RAY_AUTH_MODE": "token",
    # A dead node is noticed after this many seconds.
    # Ray's first server may need more than 20 s to start on a busy machine.
    "RAY_gcs_server_port_wait_time_s": "120",
    "RAY_health_check_initial_delay_ms": "2000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "10000",
}


AGENT_PORTS = (
    "metrics_agent_port",
    "metrics_export_port",
    "dashboard_agent_listen_port",
    "runtime_env_agent_port",
)


def free_ports(count: int) -> list[int]:
    """Distinct unused ports."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("", 0))
        return [one.getsockname()[1] for one in sockets]


_start_raylet = Node.start_raylet


def start_raylet_with_known_ports(node: Any, *arguments: Any, **keywords: Any) -> Any:
    """Tell the raylet the ports of its agents before it starts.

    It waits 15 s, a constant in its code, until they have written them into these files, and ends otherwise:
    on busy cores they take longer.
    """
    for name in AGENT_PORTS:
        file = Path(node.get_session_dir_path()) / f"{name}_{node.node_id}"
        file.write_text(str(getattr(node._ray_params, name)))
    return _start_raylet(node, *arguments, **keywords)


class LogicalNodes:
    """A private cluster; this process is its driver."""

    def __init__(self, cluster: Cluster, num_gpus: int, head_gpus: int | None = None) -> None:
        self._cluster = cluster
        self._num_gpus = num_gpus
        self._head_gpus = num_gpus if head_gpus is None else head_gpus
        self.nodes: dict[str, Any] = {}

    @property
    def address(self) -> str:
        """Address of the cluster, for RAY_ADDRESS."""
        return self._cluster.address

    @property
    def addresses(self) -> list[str]:
        """Addresses of all nodes, in the order in which slime counts GPUs."""
        return sorted(self.nodes, key=lambda address: [int(part) for part in address.split(".")])

    def add(self) -> str:
        """Add a node at the first free address; return that."""
        free = (f"127.0.0.{number}" for number in count(2) if f"127.0.0.{number}" not in self.nodes)
        address, num_gpus = (next(free), self._num_gpus) if self.nodes else (get_current_node_ip(), self._head_gpus)
        with patch.object(Node, "start_raylet", start_raylet_with_known_ports):
            self.nodes[address] = self._cluster.add_node(
                num_gpus=num_gpus,
                num_cpus=2 * self._num_gpus + 4,
                node_ip_address=address,
                object_store_memory=OBJECT_STORE_BYTES,
                include_dashboard=False,
                **dict(zip(AGENT_PORTS, free_ports(len(AGENT_PORTS)), strict=True)),
                # Code that asks for its node's address gets the logical one.
                env_vars={"SLIME_HOST_IP": address},
            )
        return address

    def remove(self, address: str, *, sigterm: bool = False) -> None:
        """Kill the node, as a power cut would, or by SIGTERM to Ray's own process, which tells no worker."""
        self._cluster.remove_node(self.nodes.pop(address), allow_graceful=sigterm)


@contextmanager
def logical_nodes(
    num_nodes: int, num_gpus: int, job_variables: Mapping[str, str] | None = None, head_gpus: int | None = None
) -> Iterator[LogicalNodes]:
    """``num_nodes`` nodes of ``num_gpus`` GPUs each, with this process connected; everything ends with the block.

    Args:
        num_nodes: number of nodes.
        num_gpus: GPUs of each.
        job_variables: the job's variables from ``ray job submit --runtime-env-json``, including its driver's.
        head_gpus: GPUs of the first node, if different.
    """
    variables = dict(job_variables or {})
    with patch.dict(os.environ, ENVIRONMENT | variables):
        Config.initialize("")  # Ray read the mode when it was imported
        ensure_token_if_auth_enabled()
        nodes = LogicalNodes(Cluster(), num_gpus, head_gpus)
        try:
            for _ in range(num_nodes):
                nodes.add()
            ray.init(address=nodes.address, log_to_driver=False, runtime_env={"env_vars": variables})
            yield nodes
        finally:
            ray.shutdown()
            nodes._cluster.shutdown()
