"""Finds GPUs for the trainer after a node has died: its own if the node comes back, otherwise spare ones.

    node dies -> Ray reclaims its bundles and places them on nodes that join, once all lost bundles fit
              -> the ranks start on these bundles as soon as they are placed
              -> or, after NODE_RETURN_S, on spare bundles (--spare-nodes); the lost bundles then become the reserve

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
"""Seconds to wait for a node to come back before spare GPUs are used."""
POLL_S = 0.5
CONNECT_TIMEOUT_S = 2.0
"""Seconds for a node to accept a connection."""
SHARE = 0.4
"""GPU share of the task that identifies a bundle's GPU; fits into what a trainer rank released."""


class TrainerGpus:
    """Finds GPUs for the ranks of a restarting trainer.

    Args:
        args: the run's arguments.
        gpus: the result of ``create_placement_groups``.
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
        """Bundle -> its current or last node."""
        self._leaving: dict[str | None, float] = {}
        """Node that will be taken away -> time until which it may still answer."""

    def is_elsewhere(self, rank: int) -> bool:
        """Return whether a rank is on another node than this process."""
        return self._group is None or self._nodes.get(self._mine[rank]) != ray.get_runtime_context().get_node_id()

    def avoid(self, ranks: Sequence[int], seconds: float) -> None:
        """Start nothing on the nodes of these ranks for ``seconds``, during which the nodes are taken away."""
        until = time.monotonic() + seconds
        self._leaving |= {self._nodes.get(self._mine[rank]): until for rank in ranks}

    def find_again(self) -> GpuSlice:
        """Return a GPU on a live node for each rank; waits for nodes to come back, or uses spare GPUs.

        Raises:
            ProcessError: not enough GPUs after ``--cluster-wait-timeout-s``.
            HangError: a node of the chosen GPUs dies or hangs too; call again to find others.
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
                    f"back within {self._wait_s:.0f} s (--cluster-wait-timeout-s), and of {len(self._reserve)} spare "
                    f"GPUs {sum(bundle in placed for bundle in self._reserve)} are available (--spare-nodes "
                    f"{self._num_spare_nodes}). Bring the node back, or start with more spare nodes."
                )
            if time.monotonic() >= next_report:
                logger.warning("%d of the trainer's GPUs are gone; waiting for their node to come back", len(lost))
                next_report += 10
            time.sleep(POLL_S)
        if chosen != self._mine:
            logger.warning("The trainer moves to %d spare GPUs (--spare-nodes).", len(lost))
            self._reserve = [bundle for bundle in self._reserve if bundle not in chosen] + lost
            self._mine = chosen
        self._identify([bundle for bundle in chosen if placed[bundle] != self._nodes.get(bundle)])
        self._nodes |= placed
        return GpuSlice(self._group, chosen, [self._gpu_ids[bundle] for bundle in chosen])

    def _table(self) -> dict[int, str]:
        """Return bundle -> node according to Ray; bundles that wait for a node are missing."""
        nodes = placement_group_table(self._group)["bundles_to_node_id"] if self._group is not None else {}
        return {int(bundle): node for bundle, node in nodes.items() if node}

    def _placed(self) -> dict[int, str]:
        """Return bundle -> node for nodes that answer now; Ray notices a node's death only after half a minute."""
        table = self._table()
        used = set(table.values()) - self._still_leaving()
        alive = {node["NodeID"] for node in ray.nodes() if node["NodeID"] in used and node["Alive"] and answers(node)}
        return {bundle: node for bundle, node in table.items() if node in alive}

    def _still_leaving(self) -> set[str | None]:
        now = time.monotonic()
        return {node for node, until in self._leaving.items() if now < until}

    def _identify(self, moved: Sequence[int]) -> None:
        """Find out which GPUs these bundles have on their new nodes."""
        if moved:
            try:
                found = bundle_identities(self._group, moved, share=SHARE)
            except (RayError, DeadlineError) as error:
                raise HangError(f"the new node of {len(moved)} GPUs did not identify them: {error}") from error
            self._gpu_ids |= {bundle: gpu_id for bundle, (_, gpu_id) in zip(moved, found, strict=True)}


def answers(node: Mapping[str, Any]) -> bool:
    """Return True if the raylet of a node (an entry of ``ray.nodes()``) accepts a connection."""
    try:
        socket.create_connection(
            (node["NodeManagerAddress"], node["NodeManagerPort"]), timeout=CONNECT_TIMEOUT_S
        ).close()
    except OSError:
        return False
    return True


def choose(mine: Sequence[int], reserve: Sequence[int], placed: Mapping[int, str]) -> list[int] | None:
    """Return a bundle for each rank: its own if placed, otherwise a placed spare one; None if there are too few."""
    free = [bundle for bundle in reserve if bundle in placed]
    lost = [bundle for bundle in mine if bundle not in placed]
    if len(free) < len(lost):
        return None
    instead = dict(zip(lost, free, strict=False))
    return [instead.get(bundle, bundle) for bundle in mine]
