"""A group of identical engines of one model: starts them, records their events, and acts as ``lifecycle`` says.

A restarted engine has the weights of the checkpoint on disk, so it gets no requests until the trainer has pushed the
current ones.
"""

from __future__ import annotations

import logging
import threading
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import ray

from slime.backends.sglang_utils.router_process import RouterHandle, unregister_worker
from slime.backends.sglang_utils.sglang_config import ModelConfig, ServerGroupConfig
from slime.observability import telemetry
from slime.ray.engines.actor import (
    EXITS_TIMEOUT_S,
    PortCursors,
    allocate_addresses,
    exits_of,
    kill_actors,
    start_engine_actor,
)
from slime.ray.engines.deadlines import MAX_START_ATTEMPTS, MIN_WAIT_S, restart_timeout_s, start_timeout_s
from slime.ray.engines.lifecycle import LIVE, SERVES, UNSETTLED, Action, EngineEvent, EngineState, next_step
from slime.ray.gpus import GpuSlice
from slime.ray.waiting import name_actor, wait_for
from slime.utils.errors import DeadlineError, EngineDiedError, ProcessError
from slime.utils.http_utils import add_job_servers
from slime.utils.net import http_url

logger = logging.getLogger(__name__)

MAX_RESTARTS = 5
"""Restarts allowed per engine within one rollout or evaluation; repeated deaths have a persistent cause."""


END_ADVICE = {
    False: "restart the job to resume from the last checkpoint, or pass --use-fault-tolerance to have engines "
    "restarted",
    True: "restart the job to resume from the last checkpoint",
}


@dataclass
class EngineGroup:
    """Identical engines of one model on consecutive GPUs.

    ``all_engines`` has one actor (or None) per engine and node; ``engines`` has the actor of each engine's first
    node, which serves HTTP.
    """

    args: Namespace
    gpus: GpuSlice
    model: ModelConfig
    config: ServerGroupConfig
    gpu_offset: int
    rank_offset: int
    router: RouterHandle | None
    needs_offload: bool
    cursors: PortCursors
    restarts: bool = True
    """True if evicted engines are restarted; otherwise the run ends or drops them."""
    revive_router: Callable[[], None] = lambda: None
    """Restarts the router if it has ended or hangs; a starting engine may need it to register."""
    extra_overrides: dict[str, Any] = field(default_factory=dict)
    """ServerArgs fields derived from other groups; the group's own overrides take precedence."""
    all_engines: list[Any] = field(default_factory=list)
    given_up: str | None = None
    """Why the run must end: an engine of this group is lost and cannot be restarted.  None while all is well."""
    dtype: str = ""
    """The dtype in which the engines compute; empty if unknown."""
    weight_loaders: tuple[str, ...] = ()
    """Import paths of weight loaders that the engines are allowed to run."""
    worker_key: str | None = None
    """Key with which the router authenticates to the engines; None without a job secret."""
    nodes_per_engine: int = 0
    """Actors per engine; 0 means one for each node that its GPUs span."""

    def __post_init__(self) -> None:
        self.num_gpus_per_engine = self.config.num_gpus_per_engine
        if not self.nodes_per_engine:
            self.nodes_per_engine = max(1, self.num_gpus_per_engine // self.args.num_gpus_per_node)
        self.gpus_per_actor = self.num_gpus_per_engine // self.nodes_per_engine
        # Engines that take updates must wait for the trainer's weights after a restart; encoders never get any.
        is_trained = self.config.worker_type != "encoder" and not self.args.debug_rollout_only
        self.takes_updates = is_trained and self.model.update_weights
        self.all_engines = [None] * (self.config.num_gpus // self.gpus_per_actor)
        first = EngineState.RETIRED if self.config.worker_type == "placeholder" else EngineState.STARTING
        self.states = [first] * len(self.engines)
        self.urls: list[str | None] = [None] * len(self.engines)
        self.bootstrap_ports: list[int | None] = [None] * len(self.engines)
        self.is_listed = [False] * len(self.engines)
        """For each engine, True if it is registered with the router."""
        self.starting: dict[int, list[ray.ObjectRef]] = {}
        """Index of an engine in its first start -> references that resolve once it serves and is registered."""
        self.shutting_down: list[ray.ObjectRef] = []
        """References that resolve once stopped engines have ended."""
        self._num_restarts: Counter[int] = Counter()
        self.num_evictions = 0
        """Number of evictions in this group since the job began."""
        self._changed = threading.Condition()

    # The engines

    @property
    def engines(self) -> list[Any]:
        """The actors that serve HTTP; None in place of a missing engine."""
        return self.all_engines[:: self.nodes_per_engine]

    def indices(self, *states: EngineState) -> list[int]:
        """Return the indices of engines in one of ``states``."""
        return [index for index, state in enumerate(self.states) if state in states]

    def actors_of(self, index: int) -> list[Any]:
        """Return the actors of one engine, one per node."""
        first = index * self.nodes_per_engine
        return self.all_engines[first : first + self.nodes_per_engine]

    def name_of(self, index: int) -> str:
        """Return the engine's name for messages."""
        return f"engine {index} ({self.config.worker_type}) of model {self.model.name!r}"

    # Start

    def start(self) -> None:
        """Start every engine; called again, restart only those that ended.  ``models.wait_until_serving`` waits."""
        for index, reason in self.find_exited(EXITS_TIMEOUT_S, [EngineState.STARTING]).items():
            logger.warning("Restarting %s: %s", self.name_of(index), reason)
            self._kill(index)
        if missing := [index for index in self.indices(EngineState.STARTING) if self.engines[index] is None]:
            refs, nodes = self._launch(missing, register=True), self.nodes_per_engine
            self.starting |= {index: refs[i * nodes : (i + 1) * nodes] for i, index in enumerate(missing)}

    def raise_if_startup_failed(self) -> None:
        """Raise if the router, or a node of a starting engine that was already up, has ended.

        Raises:
            EngineDiedError: one has ended; the message has the end of its log.
        """
        if self.router is not None and self.router.process is not None and (end := self.router.process.describe_end()):
            raise EngineDiedError(f"{end}\nThe router ended while the engines started.")
        up: dict[int, list[Any]] = {}
        for index, refs in self.starting.items():
            done = set(ray.wait(refs, num_returns=len(refs), timeout=0)[0])
            up[index] = [actor for actor, ref in zip(self.actors_of(index), refs, strict=True) if ref in done]
        for index, end in exits_of(up, EXITS_TIMEOUT_S).items():
            raise EngineDiedError(f"{self.name_of(index)} ended while others started: {end}")

    def _launch(self, indices: Sequence[int], *, register: bool) -> list[ray.ObjectRef]:
        """Start actors and servers of these engines; return references that resolve once they serve."""
        nodes = self.nodes_per_engine
        ranks = [index * nodes + node for index in indices for node in range(nodes)]
        overrides = self.extra_overrides | dict(self.config.overrides)
        if self.args.offload_rollout and not self.needs_offload:
            overrides.setdefault("enable_memory_saver", False)
        if self.needs_offload and not (self.takes_updates and self.weight_loaders):
            # No push restores all weights that it releases; slime's loaders read the rest from the checkpoint again.
            overrides.setdefault("enable_weights_cpu_backup", True)
        for rank in ranks:
            position = self.gpu_offset + rank * self.gpus_per_actor
            self.all_engines[rank] = start_engine_actor(
                self.gpus,
                position,
                self.args,
                rank=self.rank_offset + rank,
                node_rank=rank % nodes,
                worker_type=self.config.worker_type,
                base_gpu_id=self.gpus.gpu_ids[position],
                sglang_overrides=overrides,
                num_gpus_per_engine=self.num_gpus_per_engine,
                model_path=self.model.model_path,
            )
            name_actor(self.all_engines[rank], f"the actor of {self.name_of(rank // nodes)}")
        engines = [self.all_engines[rank] for rank in ranks]
        addresses = allocate_addresses(
            engines,
            nodes_per_engine=nodes,
            worker_type=self.config.worker_type,
            cursors=self.cursors,
            timeout_s=start_timeout_s(self.args.engine_start_timeout_s),
            dp_size=self.args.sglang_dp_size or 1,
        )
        for index, address in zip(indices, addresses[::nodes], strict=True):
            url = self.urls[index] = http_url(address.host, address.port)
            add_job_servers(url)
            self.bootstrap_ports[index] = address.disaggregation_bootstrap_port
        return [
            engine.init.remote(
                **asdict(address),
                router_ip=self.router.host if self.router else None,
                router_port=self.router.port if self.router else None,
                timeout_s=self.args.engine_start_timeout_s,
                register=register,
            )
            for engine, address in zip(engines, addresses, strict=True)
        ]

    # Life

    def report(self, index: int, event: EngineEvent, reason: str = "") -> None:
        """Report an event of an engine: sets the engine's next state and takes the table's action.

        ``reason`` appears in the log and in the error that may end the run.

        Raises:
            RuntimeError: the event cannot happen in the engine's state.
            ProcessError: the router does not accept the engine, which then waits for the next push.
        """
        with self._changed:
            before = self.states[index]
            step = next_step(before, event, self.name_of(index))
            if step.action is Action.AWAIT_WEIGHTS and not self.takes_updates:
                step = next_step(step.state, EngineEvent.PUSH_DONE, self.name_of(index))
            self.states[index] = step.state
            if step.action is Action.END_RUN:
                self.given_up = reason
            self._changed.notify_all()
        if step.state is not before:
            level = logging.ERROR if step.action is Action.EVICT else logging.WARNING if reason else logging.DEBUG
            logger.log(level, "%s is now %s: %s", self.name_of(index), step.state.value, reason or event.value)
            if event not in (EngineEvent.PUSH_STARTED, EngineEvent.PUSH_DONE):
                what = {"engine": self.name_of(index), "state": step.state.value}
                telemetry.event("engine", **what, why=reason or event.value)
        match step.action:
            case Action.REGISTER:
                self._register(index)
            case Action.EVICT:
                self._evict(index, event, reason)
            case Action.RESTART:
                self._restart(index, reason)
            case Action.SHUT_DOWN:
                self._shut_down(index)

    def _register(self, index: int) -> None:
        engine = self.engines[index]
        if self.is_listed[index] or engine is None:
            return
        try:
            what = f"{self.name_of(index)} to be registered"
            wait_for(engine.register.remote(), what=what, timeout_s=90)
        except ProcessError:
            self.report(index, EngineEvent.PUSH_STARTED, "the router did not accept it")
            raise
        with self._changed:
            self.is_listed[index] = self.states[index] in SERVES  # it may have been evicted meanwhile
        logger.info("%s is back at %s", self.name_of(index), self.urls[index])

    def _evict(self, index: int, event: EngineEvent, reason: str) -> None:
        """Kill the engine and restart it in the background, drop it, or end the run."""
        self._num_restarts[index] += 1
        self.num_evictions += 1
        if event is EngineEvent.PUSH_REFUSED and self.args.weight_push_failure == "drop":
            self._kill(index)
            self.report(index, EngineEvent.DROPPED, "the run continues without it")
        elif not self.restarts:
            self.report(index, EngineEvent.GIVEN_UP, f"{self.name_of(index)}: {reason}")
        elif self._num_restarts[index] > MAX_RESTARTS:
            self._kill(index)
            why = f"it died {MAX_RESTARTS + 1} times within one rollout or evaluation, last: {reason}"
            self.report(index, EngineEvent.GIVEN_UP, f"{self.name_of(index)} cannot be restarted: {why}")
        else:

            def free_slot() -> None:
                self._kill(index)
                self.report(index, EngineEvent.SLOT_FREE, reason)

            name = f"restart-{self.rank_offset}-{index}"
            threading.Thread(target=free_slot, name=name, daemon=True).start()

    def _restart(self, index: int, reason: str) -> None:
        last = ""
        register = not self.takes_updates
        for attempt in range(1, MAX_START_ATTEMPTS + 1):
            logger.info("Restarting %s (attempt %d of %d)", self.name_of(index), attempt, MAX_START_ATTEMPTS)
            deadline_s = time.monotonic() + start_timeout_s(self.args.engine_start_timeout_s)
            try:
                if register:
                    self.revive_router()
                starting = self._launch([index], register=register)
                what = f"{self.name_of(index)} to restart"
                wait_for(starting, what=what, timeout_s=max(deadline_s - time.monotonic(), MIN_WAIT_S))
            except Exception as error:  # thread boundary: after any error the slot must be cleared
                if self.states[index] is EngineState.RETIRED:
                    return  # the job ended meanwhile
                logger.exception("%s did not start", self.name_of(index))
                last = f"{type(error).__name__}: {error}"
                self._kill(index)
                continue
            self.is_listed[index] = register
            self.report(index, EngineEvent.STARTED)
            return
        why = f"after it ended ({reason}), {MAX_START_ATTEMPTS} replacements did not start: {last}"
        self.report(index, EngineEvent.GIVEN_UP, f"{self.name_of(index)} cannot be restarted: {why}")

    def _kill(self, index: int) -> None:
        """Remove the engine from the router and kill what is left of it."""
        try:
            self.delist(index)
            kill_actors([actor for actor in self.actors_of(index) if actor is not None])
        except Exception:  # boundary of restart threads; if the GPUs are not free, the next start fails
            logger.exception("%s could not be killed", self.name_of(index))
        first = index * self.nodes_per_engine
        self.all_engines[first : first + self.nodes_per_engine] = [None] * self.nodes_per_engine
        self.urls[index] = None

    def delist(self, index: int) -> None:
        """Remove the engine from the router."""
        url, self.is_listed[index] = self.urls[index], False
        if self.router is None or url is None:
            return
        try:
            unregister_worker(self.router.control, url)
        except ProcessError as error:
            logger.warning("Could not remove %s from the router: %s", self.name_of(index), error)

    def _shut_down(self, index: int) -> None:
        self.shutting_down += [actor.shutdown.remote() for actor in self.actors_of(index) if actor is not None]

    def find_exited(self, timeout_s: float, states: Sequence[EngineState] = LIVE) -> dict[int, str]:
        """Return index -> how it ended, for engines in one of ``states`` with a dead process on any node.

        Args:
            timeout_s: an actor that does not answer within this time counts as busy, not dead; Ray reports deaths.
        """
        actors = {index: [a for a in self.actors_of(index) if a is not None] for index in self.indices(*states)}
        return exits_of(actors, timeout_s)

    def begin_rollout(self) -> None:
        """Reset the restart counts, and remove engines that are being evicted from the router.

        Their servers may outlive their actors, and answer with old weights or from memory already released.
        """
        self._num_restarts.clear()
        for index, state in enumerate(self.states):
            if state is EngineState.EVICTED:
                self.delist(index)

    def wait_settled(self, timeout_s: float | None = None) -> None:
        """Wait until no engine is starting, by default for as long as all restart attempts may take.

        Raises:
            DeadlineError: an engine is still starting after ``timeout_s`` seconds.
            EngineDiedError: an engine cannot be restarted.
        """
        timeout_s = restart_timeout_s(self.args.engine_start_timeout_s) if timeout_s is None else timeout_s
        with self._changed:
            settled = self._changed.wait_for(
                lambda: self.given_up is not None or not self.indices(*UNSETTLED), timeout_s
            )
        if self.given_up is not None:
            raise EngineDiedError(self.given_up)
        if not settled:
            raise DeadlineError(
                f"{self.name_of(self.indices(*UNSETTLED)[0])} is still starting after {timeout_s:.0f} s "
                "(--engine-start-timeout-s); look at its log"
            )


def raise_if_given_up(groups: Iterable[EngineGroup]) -> None:
    """Raise if one of ``groups`` has lost an engine that the run needs.

    Raises:
        EngineDiedError: a group has given up; the message has its reason and advice.
    """
    for group in groups:
        if group.given_up is not None:
            advice = END_ADVICE[group.args.use_fault_tolerance]
            raise EngineDiedError(f"{group.given_up}. The run cannot continue; {advice}.")
