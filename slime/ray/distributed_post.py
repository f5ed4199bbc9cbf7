"""HTTP requests posted from several processes (``--use-distributed-post``).

By default one process builds and parses the JSON of every request.  If that is the bottleneck (very many short
responses, or many megabytes of images), actors on every node share the work; responses come back through Ray, at the
cost of one more copy.  Which is faster was not measured.
"""

from __future__ import annotations

import itertools
import logging
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from slime.ray.utils import COMMON_ACTOR_ENV
from slime.ray.waiting import wait_for
from slime.utils.http_utils import PostTransportUnavailable, init_http_client, post, set_post_transport

logger = logging.getLogger(__name__)

CPU_SHARE = 0.001
"""Cores that Ray reserves per actor; tiny, so that the actors always fit beside the rest of the job."""
START_TIMEOUT_S = 120.0


class _Poster:
    """Actor that posts requests."""

    def __init__(self, args: Namespace) -> None:
        init_http_client(args)

    def ready(self) -> bool:
        """Return True; answers once the process is up."""
        return True

    async def post(self, url: str, payload: Any, max_retries: int, headers: Mapping[str, str] | None) -> Any:
        """Send a request as ``slime.utils.http_utils.post`` does."""
        return await post(url, payload, max_retries, headers)


_RemotePoster: Any = ray.remote(num_cpus=CPU_SHARE, num_gpus=0)(_Poster)


class DistributedPost:
    """A post transport that uses actors round-robin.

    Dead actors are dropped.  When none is left, the caller posts from its own process.
    """

    def __init__(self, posters: list[Any]) -> None:
        self._posters = posters
        self._turn = itertools.count()

    async def __call__(self, url: str, payload: Any, max_retries: int, headers: Mapping[str, str] | None) -> Any:
        """Return the answer.

        Raises:
            EngineError: as ``post`` does.
            PostTransportUnavailable: no actor is left, or the chosen one has died.
        """
        posters = self._posters
        if not posters:
            raise PostTransportUnavailable("no posting actor is left (--use-distributed-post)")
        poster = posters[next(self._turn) % len(posters)]
        try:
            return await poster.post.remote(url, payload, max_retries, headers)
        except RayTaskError as error:
            raise (error.cause if isinstance(error.cause, Exception) else error) from error
        except RayActorError as error:
            self._posters = [other for other in self._posters if other is not poster]
            raise PostTransportUnavailable(f"a posting actor died; {len(self._posters)} are left: {error}") from error


def start_distributed_post(args: Namespace) -> DistributedPost:
    """Start ``--num-gpus-per-node`` posting actors on every node (at most one per core) and post through them."""
    posters = []
    nodes = [node for node in ray.nodes() if node["Alive"]]
    for node in nodes:
        count = max(1, min(args.num_gpus_per_node, int(node["Resources"].get("CPU", 1))))
        strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=True)
        options = {"scheduling_strategy": strategy, "max_concurrency": 4096}
        options["runtime_env"] = {"env_vars": COMMON_ACTOR_ENV}
        posters += [_RemotePoster.options(**options).remote(args) for _ in range(count)]
    wait_for([poster.ready.remote() for poster in posters], what="the posting actors", timeout_s=START_TIMEOUT_S)
    logger.info("Posting requests from %d actors on %d nodes", len(posters), len(nodes))
    transport = DistributedPost(posters)
    set_post_transport(transport)
    return transport
