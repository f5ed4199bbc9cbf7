"""Helpers for slime's Ray actors: environment variables, node addresses, and a cluster-wide lock."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import ray
import torch

from slime.utils import env
from slime.utils.net import get_current_node_ip, get_free_port, loopback_address

NOSET_VISIBLE_DEVICES = {
    f"RAY_EXPERIMENTAL_NOSET_{name}": "1"
    for name in (
        "CUDA_VISIBLE_DEVICES",
        "MUSA_VISIBLE_DEVICES",
        "ROCR_VISIBLE_DEVICES",
        "ASCEND_RT_VISIBLE_DEVICES",
        "HABANA_VISIBLE_MODULES",
        "NEURON_RT_VISIBLE_CORES",
        "TPU_VISIBLE_CHIPS",
        "ONEAPI_DEVICE_SELECTOR",
    )
}
"""Keeps Ray from hiding devices: trainer and engine may share a GPU and address it by its physical index."""

COMMON_ACTOR_ENV = {"RAY_USE_UVLOOP": "0"}
"""SGLang installs its own event-loop policy, with which Ray's uvloop would conflict."""

RELEASE_GRACE_S = 5.0
"""Seconds after a kill until the GPU driver has reclaimed the process's memory."""


def ray_transport(rollout_data_transport: str) -> str | None:
    """Return the name of Ray's tensor transport for rollout data; None for the object store."""
    return "nixl" if rollout_data_transport == "nixl" else None


def cluster_has_accelerators() -> bool:
    """Return True if a node of the cluster has real GPUs; a CPU machine may declare logical ones.

    Queries the whole cluster because the driver may run on a node without GPUs.
    """
    return torch.cuda.is_available() or lists_accelerators(ray.cluster_resources())


def lists_accelerators(resources: Mapping[str, float]) -> bool:
    """Return True if Ray's resources (of a node or the cluster) include real GPUs."""
    return any(name.startswith("accelerator_type:") for name in resources)


def listen_address() -> str:
    """Return the address on which the job's servers on this node listen.

    Loopback in a single-node cluster; otherwise, or with ``SLIME_HOST_IP``, the address that other nodes can reach.
    """
    nodes = ray.nodes() if ray.is_initialized() else ()
    is_alone = sum(node["Alive"] for node in nodes) <= 1
    return loopback_address() if is_alone and env.host_ip_override() is None else get_current_node_ip()


def one_node_environment() -> dict[str, str]:
    """Return variables that keep gloo and NCCL, which have no authentication, on this host; {} with several nodes.

    An interface set in the driver's environment takes precedence.
    """
    if listen_address() != loopback_address():
        return {}
    return {name: env.get_str(name, "lo") or "lo" for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")}


class RayActor:
    """Base class of actors that others must reach over the network."""

    @staticmethod
    def _get_current_node_ip_and_free_port(start_port: int = 10000, consecutive: int = 1) -> tuple[str, int]:
        """Return this node's address and the first of ``consecutive`` free ports at or above ``start_port``."""
        return listen_address(), get_free_port(start_port=start_port, consecutive=consecutive)

    def get_master_addr_and_port(self) -> tuple[str, int]:
        """Return this node's address and a port for torch.distributed, held open until the ranks rendezvous."""
        from slime.utils.distributed_utils import hold_port

        address = listen_address()
        return address, hold_port(address, random.randint(20000, 21000))


class _Lock:
    """A cluster-wide lock for polling: ``acquire`` never blocks."""

    def __init__(self) -> None:
        self._held = False

    def acquire(self) -> bool:
        """Take the lock if it is free; return whether it was."""
        if self._held:
            return False
        self._held = True
        return True

    def release(self) -> None:
        """Release the lock."""
        if not self._held:
            raise RuntimeError("release of a lock that nobody holds")
        self._held = False


Lock: Any = ray.remote(num_cpus=0)(_Lock)
"""Actor class of a cluster-wide lock, started with ``Lock.remote()``."""
