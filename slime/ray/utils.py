"""Functions that slime's Ray actors share: their environment and their node's address; a lock in the cluster."""

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
"""Ray must not hide devices: trainers and engines of one GPU share it, and address it by its physical index."""

COMMON_ACTOR_ENV = {"RAY_USE_UVLOOP": "0"}
"""SGLang installs its own event-loop policy; Ray's would get in its way."""

RELEASE_GRACE_S = 5.0
"""After a kill, until a driver has taken the memory of the GPU back."""


def ray_transport(rollout_data_transport: str) -> str | None:
    """Return the name of Ray's transport for the tensors of rollout data; None for its object store."""
    return "nixl" if rollout_data_transport == "nixl" else None


def cluster_has_accelerators() -> bool:
    """Return True when a node of the cluster has real GPUs (a CPU machine may declare logical ones).

    Asked of the cluster, because the driver may run on a node without GPUs.
    """
    return torch.cuda.is_available() or lists_accelerators(ray.cluster_resources())


def lists_accelerators(resources: Mapping[str, float]) -> bool:
    """Return True when Ray's resources, of a node or of all, have real GPUs among them."""
    return any(name.startswith("accelerator_type:") for name in resources)


def listen_address() -> str:
    """Return the address at which servers of the job on this node listen.

    Loopback where the cluster has this node alone; otherwise, or with ``SLIME_HOST_IP``, the one by which other nodes
    reach it.
    """
    nodes = ray.nodes() if ray.is_initialized() else ()
    is_alone = sum(node["Alive"] for node in nodes) <= 1
    return loopback_address() if is_alone and env.host_ip_override() is None else get_current_node_ip()


def one_node_environment() -> dict[str, str]:
    """Return the variables by which gloo and NCCL, which know no secret, stay on this host; {} over several nodes.

    What the driver's environment says of an interface wins.
    """
    if listen_address() != loopback_address():
        return {}
    return {name: env.get_str(name, "lo") or "lo" for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")}


class RayActor:
    """Base of actors that others must reach over the network."""

    @staticmethod
    def _get_current_node_ip_and_free_port(start_port: int = 10000, consecutive: int = 1) -> tuple[str, int]:
        """Return this node's address and the first of ``consecutive`` free ports at or above ``start_port``."""
        return listen_address(), get_free_port(start_port=start_port, consecutive=consecutive)

    def get_master_addr_and_port(self) -> tuple[str, int]:
        """Return address and port for torch.distributed on this node; it listens there until the ranks meet."""
        from slime.utils.distributed_utils import hold_port

        address = listen_address()
        return address, hold_port(address, random.randint(20000, 21000))


class _Lock:
    """A cluster-wide lock that is polled: ``acquire`` never blocks."""

    def __init__(self) -> None:
        self._held = False

    def acquire(self) -> bool:
        """Take the lock if it is free; says whether it was."""
        if self._held:
            return False
        self._held = True
        return True

    def release(self) -> None:
        """Give the lock back."""
        if not self._held:
            raise RuntimeError("release of a lock that nobody holds")
        self._held = False


Lock: Any = ray.remote(num_cpus=0)(_Lock)
"""``Lock.remote()`` starts one."""
