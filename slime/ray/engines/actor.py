"""An SGLang engine as a Ray actor: its environment, its GPU placement, its ports, and how it is killed.

Ray workers listen on 10002-19999 and the kernel assigns ephemeral ports from 32768 on, so engines listen in between.
The search starts at a random port in that range, moves upward and wraps around.  The random start keeps two jobs that
start together on one node from picking the same port, since a port is bound only some time after it was found free.
Each engine's own actor probes ports, on the engine's node.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray

from slime.backends.sglang_utils.child_process import run_name
from slime.backends.sglang_utils.sglang_engine import SGLangEngine
from slime.ray.engines.deadlines import MIN_WAIT_S
from slime.ray.gpus import GpuSlice, strategy_for
from slime.ray.utils import COMMON_ACTOR_ENV, NOSET_VISIBLE_DEVICES, RayActor, one_node_environment
from slime.ray.waiting import WATCH_GROUP, wait_for
from slime.utils import env
from slime.utils.errors import ProcessError
from slime.utils.net import format_host_port, loopback_address

FIRST_PORTS = range(21000, 31000)
EPHEMERAL_PORTS_BEGIN = 32768
PORTS_TIMEOUT_S = 600.0
"""Upper limit in seconds for actors to start and report free ports."""
EXITS_TIMEOUT_S = 10.0
"""Seconds for actors to report whether their servers have ended."""
KILL_TIMEOUT_S = 15.0
"""Seconds for an actor to kill its server; then the actor is killed, and the server ends with it."""
ENGINE_ENV_DEFAULTS = {
    "SGLANG_JIT_DEEPGEMM_PRECOMPILE": "false",
    "SGLANG_JIT_DEEPGEMM_FAST_WARMUP": "true",
    "SGL_DISABLE_TP_MEMORY_INBALANCE_CHECK": "true",
    "SGLANG_DISABLE_TP_MEMORY_INBALANCE_CHECK": "true",
    "SGLANG_MEMORY_SAVER_CUDA_GRAPH": "true",
    "SGLANG_BATCH_INVARIANT_OPS_ENABLE_MM_FALLBACK_VARIANT": "true",
    # A health probe that generates a token while the memory is released kills the scheduler.
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "false",
}
"""Defaults; values in the driver's environment take precedence."""


class EngineActor(RayActor, SGLangEngine):
    """``SGLangEngine`` as a Ray actor, with a port probe and with calls that answer while another call runs."""

    @ray.method(concurrency_group=WATCH_GROUP)
    def describe_exit(self) -> str | None:
        """See ``SGLangEngine``."""
        return super().describe_exit()

    @ray.method(concurrency_group=WATCH_GROUP)
    def kill_server(self) -> None:
        """Kill the server's processes, even stopped ones; the actor lives on."""
        if self.process is not None:
            self.process.stop()


RemoteEngine = ray.remote(concurrency_groups={WATCH_GROUP: 1})(EngineActor)


def start_engine_actor(gpus: GpuSlice | None, position: int, *arguments: Any, **keywords: Any) -> Any:
    """Start an engine actor on the slice's GPU at ``position``; without a GPU (external engine) if None."""
    variables = COMMON_ACTOR_ENV | NOSET_VISIBLE_DEVICES
    variables |= {name: env.get_str(name, default) or default for name, default in ENGINE_ENV_DEFAULTS.items()}
    variables["SLIME_LOG_RUN"] = run_name()
    share = 0.2 if gpus is not None else 0
    options: dict[str, Any] = {"num_cpus": share, "num_gpus": share, "runtime_env": {"env_vars": variables}}
    if gpus is not None:
        variables |= one_node_environment()
        options["scheduling_strategy"] = strategy_for(gpus, position)
    return RemoteEngine.options(**options).remote(*arguments, **keywords)


def exits_of(actors: Mapping[int, Sequence[Any]], timeout_s: float) -> dict[int, str]:
    """Return engine index -> how it ended, for each engine with a dead process.

    Args:
        actors: engine index -> its actors, one per node.
        timeout_s: an actor that does not answer within this time counts as busy, not dead; Ray reports deaths.
    """
    asked = {actor.describe_exit.remote(): index for index, several in actors.items() for actor in several}
    if not asked:
        return {}
    done, _ = ray.wait(list(asked), num_returns=len(asked), timeout=timeout_s)
    found: dict[int, str] = {}
    for ref in done:
        try:
            sentence = wait_for(ref, what="an engine's state", timeout_s=10)
        except ProcessError as error:
            sentence = str(error)
        if sentence:
            found.setdefault(asked[ref], sentence)
    return found


def kill_actors(actors: Sequence[Any]) -> None:
    """Kill the servers of ``actors``, then the actors."""
    # Servers first: a stopped or stuck server would not notice that its actor has ended.
    refs = [actor.kill_server.remote() for actor in actors]
    if refs:
        ray.wait(refs, num_returns=len(refs), timeout=KILL_TIMEOUT_S)
    for actor in actors:
        ray.kill(actor)


@dataclass(kw_only=True)
class EngineAddress:
    """Addresses of one engine actor.  Fields are named like the arguments of ``SGLangEngine.init``."""

    host: str
    port: int
    nccl_port: int
    dist_init_addr: str | None = None
    disaggregation_bootstrap_port: int | None = None


@dataclass
class PortCursors:
    """The next port to try on each node; shared by all server groups of the job."""

    first_port: int = field(default_factory=lambda: random.choice(FIRST_PORTS))
    next_port: dict[str, int] = field(default_factory=dict)


def allocate_addresses(
    engines: Sequence[Any],
    *,
    nodes_per_engine: int,
    worker_type: str,
    cursors: PortCursors,
    timeout_s: float,
    dp_size: int = 1,
) -> list[EngineAddress]:
    """Allocate one address per engine actor, in rank order, within ``min(timeout_s, PORTS_TIMEOUT_S)`` seconds in all.

    Prefill engines also get a bootstrap port.  The cursors advance past every allocated port.
    """
    addresses: list[EngineAddress] = []
    shared_rendezvous: str | None = None
    deadline_s = time.monotonic() + min(timeout_s, PORTS_TIMEOUT_S)
    for rank, engine in enumerate(engines):
        host, _ = _probe(engine, cursors.first_port, 1, deadline_s)

        def take(count: int, engine: Any = engine, host: str = host) -> int:
            start = cursors.next_port.get(host, cursors.first_port)
            if start + count > EPHEMERAL_PORTS_BEGIN:  # wrap around: ports of ended engines are free again
                start = FIRST_PORTS.start
            _, port = _probe(engine, start, count, deadline_s)
            cursors.next_port[host] = port + count
            return port

        address = EngineAddress(host=host, port=take(1), nccl_port=take(1))
        if worker_type == "prefill":
            address.disaggregation_bootstrap_port = take(1)
        if rank % nodes_per_engine == 0:
            # An engine's scheduler unpickles data from ports next to its rendezvous, so only its own nodes may reach
            # that address.  (A prefill engine puts the bootstrap server that decode engines query on the same host.)
            is_alone = nodes_per_engine == 1 and worker_type != "prefill"
            meeting = loopback_address() if is_alone else host
            shared_rendezvous = format_host_port(meeting, take(30 + dp_size))
        address.dist_init_addr = shared_rendezvous
        addresses.append(address)
    return addresses


def _probe(engine: Any, start_port: int, count: int, deadline_s: float) -> tuple[str, int]:
    return wait_for(
        engine._get_current_node_ip_and_free_port.remote(start_port, count),
        what="an engine actor to start and name a free port",
        timeout_s=max(deadline_s - time.monotonic(), MIN_WAIT_S),
    )
