"""Assignment of GPUs to the trainer and the engines.

One Ray placement group holds all of the job's GPUs.  Its bundles are sorted by (node address, GPU index): training
rank r uses the r-th GPU in that order, and an engine's GPUs are adjacent.  On a machine without GPUs the GPUs are
logical: ``ray start --num-gpus N`` declares them, and nothing else changes.
"""

from __future__ import annotations

import logging
import socket
import time
from argparse import Namespace
from collections.abc import Sequence
from typing import Any, NamedTuple

import ray
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from slime.flags.cluster import plan_gpus
from slime.ray.cluster import RAY_SERVERS, connect
from slime.ray.utils import NOSET_VISIBLE_DEVICES
from slime.ray.waiting import sigterm, wait_for
from slime.utils.errors import ConfigError, DeadlineError

logger = logging.getLogger(__name__)


class GpuSlice(NamedTuple):
    """Consecutive GPUs: the placement group, and each GPU's bundle and physical index on its node."""

    placement_group: PlacementGroup | None
    bundle_indices: list[int]
    gpu_ids: list[int]

    def from_offset(self, offset: int) -> GpuSlice:
        """Return the GPUs starting at ``offset``."""
        return GpuSlice(self.placement_group, self.bundle_indices[offset:], self.gpu_ids[offset:])


def create_placement_groups(args: Namespace) -> dict[str, GpuSlice | None]:
    """Reserve all GPUs of the job and return a slice for each role.  Connects to Ray if necessary.

    Returns:
        Slices under the keys ``actor``, ``critic``, ``rollout`` and ``spare``.  The critic shares the actor's GPUs
        (None without a critic); ``spare`` starts at the GPUs of ``--spare-nodes``.

    Raises:
        ConfigError: the cluster is still too small after ``--cluster-wait-timeout-s``, or some spare GPUs are on a
            node of the trainer and would be lost with it.
    """
    connect(args)
    plan = plan_gpus(args)
    num_ranks, num_spare = (nodes * args.actor_num_gpus_per_node for nodes in (args.actor_num_nodes, args.spare_nodes))
    everything, nodes = _reserve(plan.num_gpus + num_spare, args.cluster_wait_timeout_s)
    if shared := set(nodes[:num_ranks]) & set(nodes[plan.num_gpus :]):
        raise ConfigError(
            f"--spare-nodes {args.spare_nodes}: some spare GPUs are on {', '.join(sorted(shared))}, where trainer "
            "ranks run, and would be lost with them. Add a node to the cluster, or drop the flag."
        )
    return {
        "actor": everything,
        "critic": everything if args.use_critic else None,
        "rollout": everything.from_offset(plan.rollout_offset),
        "spare": everything.from_offset(plan.num_gpus),
    }


def _reserve(num_gpus: int, timeout_s: float) -> tuple[GpuSlice, list[str]]:
    """Return ``num_gpus`` GPUs in order, and the node address of each."""
    if num_gpus == 0:
        return GpuSlice(None, [], []), []
    _wait_for_resources(num_gpus, timeout_s)
    group = placement_group([{"GPU": 1, "CPU": 1}] * num_gpus, strategy="PACK")
    try:
        wait_for(group.ready(), what="the GPUs of the job to be free", timeout_s=timeout_s)
    except DeadlineError:
        free = ray.available_resources()
        ray.util.remove_placement_group(group)
        raise ConfigError(
            f"the cluster has {num_gpus} GPUs, but only {free.get('GPU', 0):g} GPUs and {free.get('CPU', 0):g} CPUs "
            f"are free after {timeout_s:.0f} s: another job holds the rest. Stop it (ray list jobs) or ask for fewer "
            "GPUs with --actor-num-gpus-per-node / --rollout-num-gpus."
        ) from None
    identities = bundle_identities(group, range(num_gpus))
    order = sorted(range(num_gpus), key=lambda index: _sort_key(*identities[index]))
    for position, index in enumerate(order):
        logger.info("GPU %d: node %s, physical index %d, bundle %d", position, *identities[index], index)
    gpu_ids = [identities[index][1] for index in order]
    return GpuSlice(group, order, gpu_ids), [identities[index][0] for index in order]


def _wait_for_resources(num_gpus: int, timeout_s: float) -> None:
    """Wait until the cluster owns ``num_gpus`` bundles of one GPU and one CPU; nodes may still be joining."""
    deadline = time.monotonic() + timeout_s
    next_report = time.monotonic()
    while True:
        sigterm().check()
        RAY_SERVERS.check()
        total = ray.cluster_resources()
        gpus, cpus = int(total.get("GPU", 0)), int(total.get("CPU", 0))
        # The rollout manager needs one CPU in addition to those of the bundles.
        if gpus >= num_gpus and cpus >= num_gpus + 1:
            return
        lack = (
            f"the job needs {num_gpus} GPUs and {num_gpus + 1} CPUs; the Ray cluster has {gpus} GPUs and {cpus} CPUs"
        )
        if time.monotonic() >= deadline:
            raise ConfigError(
                f"{lack} after {timeout_s:.0f} s, on {_nodes_in_words()}. Add nodes (ray start --address=...), "
                "declare more with ray start --num-gpus/--num-cpus (logical ones on a CPU machine), or ask for fewer "
                "with --actor-num-nodes, --actor-num-gpus-per-node and --rollout-num-gpus."
            )
        if time.monotonic() >= next_report:
            logger.warning("%s; waiting up to %.0f s for nodes to join", lack, deadline - time.monotonic())
            next_report = time.monotonic() + 10
        time.sleep(1)


def _nodes_in_words() -> str:
    """Describe the nodes that have joined, so that a missing one is easy to spot."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    each = [f"{node['NodeManagerAddress']} with {node['Resources'].get('GPU', 0):g} GPUs" for node in alive]
    return f"{len(alive)} node{'s' if len(alive) != 1 else ''}: {', '.join(sorted(each))}"


def bundle_identities(group: PlacementGroup, bundles: Sequence[int], share: float = 1) -> list[tuple[str, int]]:
    """Return the node address and physical index of each bundle's GPU; fraction ``share`` of each must be free."""

    # A nested function is pickled by value, so the workers do not import this package and, with it, torch.
    @ray.remote(num_cpus=0, num_gpus=share, max_retries=0, runtime_env={"env_vars": NOSET_VISIBLE_DEVICES})
    def node_and_gpu() -> tuple[str, int]:
        return ray.util.get_node_ip_address(), int(ray.get_gpu_ids()[0])

    tasks = [
        node_and_gpu.options(
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
        ).remote()
        for index in bundles
    ]
    return wait_for(tasks, what="the addresses of the GPUs", timeout_s=300)


def _sort_key(node: str, gpu_id: int) -> tuple[list[int], int]:
    """Return a sort key: numeric for IPv4 addresses and resolvable host names, alphabetic for other names."""
    for address in (node, _resolve(node)):
        parts = address.split(".")
        if len(parts) == 4 and all(part.isdigit() for part in parts):
            return [int(part) for part in parts], gpu_id
    return [ord(letter) for letter in node], gpu_id


def _resolve(node: str) -> str:
    try:
        return socket.gethostbyname(node)
    except OSError:
        return node


def strategy_for(gpus: GpuSlice, position: int) -> Any:
    """Return the Ray scheduling strategy that puts an actor and its children on the slice's GPU at ``position``."""
    return PlacementGroupSchedulingStrategy(
        placement_group=gpus.placement_group,
        placement_group_bundle_index=gpus.bundle_indices[position],
        placement_group_capture_child_tasks=True,
    )
