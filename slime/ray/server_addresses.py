"""Ports of the engines, chosen so that no two engines of a node collide.

Ray's workers listen on 10002-19999 and the kernel hands out ephemeral ports from 32768 on, so engines live between.
The search starts at a random place there and moves upward: a port is only taken some time after it was found free, and
two jobs that start together on one node must not find the same one.  Ports are probed on the engine's own node, by its
own actor.
"""

from __future__ import annotations

import random
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from slime.ray.waiting import wait_for

FIRST_PORTS = range(21000, 31000)


@dataclass(kw_only=True)
class EngineAddress:
    """Where one engine actor listens."""

    host: str
    port: int
    nccl_port: int
    dist_init_addr: str | None = None
    disaggregation_bootstrap_port: int | None = None

    def as_init_arguments(self) -> dict[str, Any]:
        """The keyword arguments of ``SGLangEngine.init``."""
        return {
            "host": self.host,
            "port": self.port,
            "nccl_port": self.nccl_port,
            "dist_init_addr": self.dist_init_addr,
            "disaggregation_bootstrap_port": self.disaggregation_bootstrap_port,
        }


@dataclass
class PortCursors:
    """Next port to try on each node; shared by all server groups of the job."""

    first_port: int = field(default_factory=lambda: random.choice(FIRST_PORTS))
    next_port: dict[str, int] = field(default_factory=dict)


def allocate_addresses(
    args: Namespace, engines: Sequence[Any], *, nodes_per_engine: int, worker_type: str, cursors: PortCursors
) -> list[EngineAddress]:
    """One address per engine actor.

    Args:
        args: the run's arguments; ``sglang_dp_size`` decides how many ports an engine's rendezvous takes.
        engines: engine actor handles in rank order; an engine over several nodes has one actor on each.
        nodes_per_engine: nodes that one engine spans.
        worker_type: "prefill" engines get a bootstrap port too.
        cursors: advanced past every port that was handed out.
    """
    addresses: list[EngineAddress] = []
    shared_rendezvous: str | None = None
    for rank, engine in enumerate(engines):
        host, _ = _probe(engine, cursors.first_port, 1)

        def take(count: int, engine: Any = engine, host: str = host) -> int:
            _, port = _probe(engine, cursors.next_port.get(host, cursors.first_port), count)
            cursors.next_port[host] = port + count
            return port

        address = EngineAddress(host=host, port=take(1), nccl_port=take(1))
        if worker_type == "prefill":
            address.disaggregation_bootstrap_port = take(1)
        if rank % nodes_per_engine == 0:
            shared_rendezvous = f"{host}:{take(30 + (args.sglang_dp_size or 1))}"
        address.dist_init_addr = shared_rendezvous
        addresses.append(address)
    return addresses


def _probe(engine: Any, start_port: int, count: int) -> tuple[str, int]:
    return wait_for(
        engine._get_current_node_ip_and_free_port.remote(start_port, count),
        what="an engine actor to start and name a free port",
        timeout_s=600,
    )
