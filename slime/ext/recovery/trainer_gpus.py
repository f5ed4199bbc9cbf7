"""The trainer's GPUs after a node has died: its own where the node comes back, else those kept in reserve.

    node dies -> Ray takes its bundles back, and places them on nodes that join, once all that are lost have room
              -> the ranks start on these bundles as soon as that has happened
              -> after NODE_RETURN_S on bundles in reserve (--spare-nodes), and theirs are the reserve from then on

Engines keep their bundles throughout.
"""

from __future__ import annotations

import logging
import socket
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import placement_group_table

from slime.ray.gpus import GpuSlice, bundle_identities
from slime.ray.waiting import sigterm
from slime.utils.errors import DeadlineError, HangError, ProcessError

logger = logging.getLogger(__name__)

NODE_RETURN_S = 10.0
"""Time for a node to come back where GPUs are in reserve."""
POLL_S = 0.5
CONNECT_TIMEOUT_S = 2.0
"""For a node to take a connection."""
SHARE = 0.4
"""GPU share of the task that tells a bundle's GPU: of what a rank of the trainer gave back."""


class TrainerGpus:
    """Finds GPUs for the ranks of a trainer that starts again.

    Args:
        args: the run's arguments.
        gpus: of the job's parts, as ``create_placement_groups`` hands them out.
    """

    def __init__(self, args: Namespace, gpus: Mapping[str, GpuSlice | None]) -> None:
        actor, spare = gpus["actor"], gpus.get("spare")
        assert actor is not None
        num_ranks = args.actor_num_nodes * args.actor_num_gpus_per_node
        self._group = actor.placement_group
        self._num_spare_nodes, self._wait_s = args.spare_nodes, args.cluster_wait_timeout_s
        self._mine = actor.bundle_indices[:num_ranks]
        self._reserve = spare.bundle_indices if spare is not None else []
        self._gpu_ids = dict(zip(actor.bundle_indices, actor.gpu_ids, strict=True))
        self._nodes = self._table()
        """Where each bundle is, or was last."""
        self._leaving: dict[str | None, float] = {}
        """Nodes that are to be taken away, and until when they may still answer."""

    def is_elsewhere(self, rank: int) -> bool:
        """Return whether a rank is on another node than this process."""
        return self._group is None or self._nodes.get(self._mine[rank]) != ray.get_runtime_context().get_node_id()

    def avoid(self, ranks: Sequence[int], seconds: float) -> None:
        """Start nothing on the nodes of these ranks for so long, in which they are taken away."""
        until = time.monotonic() + seconds
        self._leaving |= {self._nodes.get(self._mine[rank]): until for rank in ranks}

    def find_again(self) -> GpuSlice:
        """Return a GPU on a node that is alive for each rank; waits for nodes to come back, or takes the reserve.

        Raises:
            ProcessError: neither is there after ``--cluster-wait-timeout-s``.
            HangError: the node of the GPUs that were found dies or hangs too; others may be found.
        """
        if self._group is None:
            return GpuSlice(None, self._mine, [self._gpu_ids[bundle] for bundle in self._mine])
        began, next_report = time.monotonic(), time.monotonic()
        while True:
            sigterm().check()
            placed, waited_s = self._placed(), time.monotonic() - began
            lost = [bundle for bundle in self._mine if bundle not in placed]
            takes_reserve = waited_s >= NODE_RETURN_S or bool(self._still_leaving())
            chosen = choose(self._mine, self._reserve if takes_reserve else [], placed)
            if chosen is not None:
                break
            if waited_s >= self._wait_s:
                raise ProcessError(
                    f"{len(lost)} of the trainer's {len(self._mine)} GPUs are on a node that died and has not come "
                    f"back within {self._wait_s:.0f} s (--cluster-wait-timeout-s), and of {len(self._reserve)} GPUs "
                    f"in reserve {sum(bundle in placed for bundle in self._reserve)} are there (--spare-nodes "
                    f"{self._num_spare_nodes}). Bring the node back, or start with more in reserve."
                )
            if time.monotonic() >= next_report:
                logger.warning("%d of the trainer's GPUs are gone; waiting for their node to come back", len(lost))
                next_report += 10
            time.sleep(POLL_S)
        if chosen != self._mine:
            logger.warning("The trainer moves to %d GPUs in reserve (--spare-nodes).", len(lost))
            self._reserve = [bundle for bundle in self._reserve if bundle not in chosen] + lost
            self._mine = chosen
        self._identify([bundle for bundle in chosen if placed[bundle] != self._nodes.get(bundle)])
        self._nodes |= placed
        return GpuSlice(self._group, chosen, [self._gpu_ids[bundle] for bundle in chosen])

    def _table(self) -> dict[int, str]:
        """Return what Ray says is the node of every bundle; nothing for one that waits for a node."""
        nodes = placement_group_table(self._group)["bundles_to_node_id"] if self._group is not None else {}
        return {int(bundle): node for bundle, node in nodes.items() if node}

    def _placed(self) -> dict[int, str]:
        """Return the node of every bundle that is on one that answers: of a death Ray learns half a minute late."""
        table = self._table()
        used = set(table.values()) - self._still_leaving()
        alive = {node["NodeID"] for node in ray.nodes() if node["NodeID"] in used and node["Alive"] and answers(node)}
        return {bundle: node for bundle, node in table.items() if node in alive}

    def _still_leaving(self) -> set[str | None]:
        now = time.monotonic()
        return {node for node, until in self._leaving.items() if now < until}

    def _identify(self, moved: Sequence[int]) -> None:
        """Note which GPUs these bundles have on their new node."""
        if moved:
            try:
                found = bundle_identities(self._group, moved, share=SHARE)
            except (RayError, DeadlineError) as error:
                raise HangError(f"the new node of {len(moved)} GPUs does not say which these are: {error}") from error
            self._gpu_ids |= {bundle: gpu_id for bundle, (_, gpu_id) in zip(moved, found, strict=True)}


def answers(node: Mapping[str, Any]) -> bool:
    """Return True when Ray's process on a node, one of ``ray.nodes()``, takes a connection."""
    try:
        socket.create_connection(
            (node["NodeManagerAddress"], node["NodeManagerPort"]), timeout=CONNECT_TIMEOUT_S
        ).close()
    except OSError:
        return False
    return True


def choose(mine: Sequence[int], reserve: Sequence[int], placed: Mapping[int, str]) -> list[int] | None:
    """Return a bundle for each rank: its own where it is placed, else one in reserve that is; None without enough."""
    free = [bundle for bundle in reserve if bundle in placed]
    lost = [bundle for bundle in mine if bundle not in placed]
    if len(free) < len(lost):
        return None
    instead = dict(zip(lost, free, strict=False))
    return [instead.get(bundle, bundle) for bundle in mine]
