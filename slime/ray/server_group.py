"""A group of like engines of one model: start them, name the dead ones, start these again on the same GPUs.

An engine goes through four states::

    MISSING --start--> STARTING --serves--> READY --weights pushed, told to the router--> SERVING
                           ^                                                                 |
                           +--------------- died, hangs or answers nonsense <----------------+

Only a SERVING engine gets requests.  An engine that starts again has the weights of the checkpoint on disk: it waits
in READY until the trainer has pushed the present ones.
"""

from __future__ import annotations

import enum
import logging
import threading
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ray

from slime.backends.sglang_utils.router_process import RouterHandle, unregister_worker
from slime.backends.sglang_utils.server_control import ServerControl
from slime.backends.sglang_utils.sglang_config import ModelConfig, ServerGroupConfig
from slime.ray.engine_actor import start_engine_actor
from slime.ray.placement_group import GpuSlice
from slime.ray.server_addresses import PortCursors, allocate_addresses
from slime.ray.waiting import wait_for
from slime.utils.errors import ConfigError, DeadlineError, EngineDiedError, ProcessError
from slime.utils.net import format_host_port

logger = logging.getLogger(__name__)

CREATES_NO_ENGINE = ("placeholder",)
MAX_START_ATTEMPTS = 3
"""Starts of a replacement, one after the other, before the run is given up."""
MAX_REPLACEMENTS = 5
"""Replacements of one engine within one rollout: an engine that dies again and again has a cause that stays."""
KILL_TIMEOUT_S = 15.0
"""How long an engine's own actor gets to kill the server; then the actor is killed, and the server follows."""


class EngineState(enum.Enum):
    """Where an engine is between its start and its requests; see the module's docstring."""

    MISSING = "missing"
    STARTING = "starting"
    READY = "ready"
    SERVING = "serving"


@dataclass
class ServerGroup:
    """Like engines of one model on a run of GPUs.

    ``all_engines`` has one actor per engine and node, None where there is none; ``engines`` are the actors of the
    first nodes, which serve HTTP.  Invariant: an engine is known to the router only while its state is SERVING (or
    STARTING for the first time).
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
    extra_overrides: dict[str, Any] = field(default_factory=dict)
    """ServerArgs fields that follow from other groups; the group's own overrides win over them."""
    all_engines: list[Any] = field(default_factory=list)
    given_up: str | None = None
    """Why an engine of this group cannot be replaced; ends the run."""

    def __post_init__(self) -> None:
        self.all_engines = [None] * self._num_actors()
        self.states = [EngineState.MISSING] * len(self.engines)
        self.urls: list[str | None] = [None] * len(self.engines)
        self.bootstrap_ports: list[int | None] = [None] * len(self.engines)
        self._replacements: Counter[int] = Counter()
        self._changed = threading.Condition()
        self._check_placement()

    def _num_actors(self) -> int:
        return self.config.num_gpus // self.gpus_per_actor

    def _check_placement(self) -> None:
        end = self.gpu_offset + len(self.all_engines) * self.gpus_per_actor
        if end > len(self.gpus.bundle_indices):
            raise ConfigError(
                f"server group {self.config.worker_type!r} of model {self.model.name!r} needs GPUs up to {end}, but "
                f"the engines have {len(self.gpus.bundle_indices)}. Set --rollout-num-gpus or the group's num_gpus."
            )

    # What there is

    @property
    def num_gpus_per_engine(self) -> int:
        """GPUs of one engine."""
        return self.config.num_gpus_per_engine

    @property
    def gpus_per_actor(self) -> int:
        """GPUs that one actor covers: its engine's, or those of one node when the engine spans several."""
        return min(self.num_gpus_per_engine, self.args.num_gpus_per_node)

    @property
    def nodes_per_engine(self) -> int:
        """Actors of one engine."""
        return max(1, self.num_gpus_per_engine // self.args.num_gpus_per_node)

    @property
    def engines(self) -> list[Any]:
        """The actors that serve HTTP, None for an engine that is not there."""
        return self.all_engines[:: self.nodes_per_engine]

    @property
    def engine_gpu_offsets(self) -> list[int]:
        """First GPU of each engine within the engines' slice."""
        return [self.gpu_offset + index * self.num_gpus_per_engine for index in range(len(self.engines))]

    @property
    def takes_updates(self) -> bool:
        """Whether a fresh engine has to wait for the trainer's weights."""
        return self.model.update_weights and not self.args.debug_rollout_only

    @property
    def acknowledges_pushes(self) -> bool:
        """Whether our weight loader runs in the engines: in those that we start, always."""
        return True

    def indices(self, *states: EngineState) -> list[int]:
        """The engines in one of ``states``."""
        return [index for index, state in enumerate(self.states) if state in states]

    def actors_of(self, index: int) -> list[Any]:
        """The actors of one engine, one for each of its nodes."""
        first = index * self.nodes_per_engine
        return self.all_engines[first : first + self.nodes_per_engine]

    def name_of(self, index: int) -> str:
        """An engine in words."""
        return f"engine {index} ({self.config.worker_type}) of model {self.model.name!r}"

    # Start

    def start(self) -> list[ray.ObjectRef]:
        """Start every engine; gives references that resolve once they serve and the router knows them."""
        if self.config.worker_type in CREATES_NO_ENGINE:
            return []
        missing = self.indices(EngineState.MISSING)
        for index in missing:
            self._set(index, EngineState.STARTING)
        return self._launch(missing, register=True)

    def started(self) -> None:
        """The references of :meth:`start` have resolved."""
        for index in self.indices(EngineState.STARTING):
            self._set(index, EngineState.SERVING)

    def _launch(self, indices: Sequence[int], *, register: bool) -> list[ray.ObjectRef]:
        """Start actors and servers of these engines."""
        nodes = self.nodes_per_engine
        ranks = [index * nodes + node for index in indices for node in range(nodes)]
        overrides = self.extra_overrides | dict(self.config.overrides)
        if self.args.offload_rollout and not self.needs_offload:
            overrides.setdefault("enable_memory_saver", False)
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
        engines = [self.all_engines[rank] for rank in ranks]
        addresses = allocate_addresses(
            self.args,
            engines,
            nodes_per_engine=nodes,
            worker_type=self.config.worker_type,
            cursors=self.cursors,
        )
        for index, address in zip(indices, addresses[::nodes], strict=True):
            self.urls[index] = f"http://{format_host_port(address.host, address.port)}"
            self.bootstrap_ports[index] = address.disaggregation_bootstrap_port
        return [
            engine.init.remote(
                **address.as_init_arguments(),
                router_ip=self.router.host if self.router else None,
                router_port=self.router.port if self.router else None,
                timeout_s=self.args.engine_start_timeout_s,
                register=register,
            )
            for engine, address in zip(engines, addresses, strict=True)
        ]

    def admit(self, index: int) -> None:
        """Tell the router of a READY engine: it holds the present weights now."""
        if self.states[index] is not EngineState.READY:
            return
        wait_for(self.engines[index].register.remote(), what=f"{self.name_of(index)} to be registered", timeout_s=90)
        self._set(index, EngineState.SERVING)
        logger.info("%s is back at %s", self.name_of(index), self.urls[index])

    # Death and replacement

    def find_exited(self, timeout_s: float) -> dict[int, str]:
        """Engines with a dead process on any node, each with how it ended.

        Args:
            timeout_s: an actor that says nothing for so long counts as busy, not dead; its death is reported by Ray.
        """
        asked = {
            actor.describe_exit.remote(): index
            for index in self.indices(EngineState.READY, EngineState.SERVING)
            for actor in self.actors_of(index)
            if actor is not None
        }
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

    def replace(self, index: int, reason: str) -> None:
        """Take an engine out of service at once and start another in its place, in the background.

        The new engine ends READY, or SERVING when no weights are pushed to this model.  ``given_up`` says when that
        does not work out.
        """
        with self._changed:
            if self.states[index] not in (EngineState.READY, EngineState.SERVING):
                return
            self.states[index] = EngineState.STARTING
            self._replacements[index] += 1
            is_hopeless = self._replacements[index] > MAX_REPLACEMENTS
            self._changed.notify_all()
        logger.error("%s is taken out of service: %s", self.name_of(index), reason)
        if is_hopeless:
            self._remove(index)
            self._give_up(index, f"it died {MAX_REPLACEMENTS + 1} times within one rollout, last: {reason}")
            return
        threading.Thread(
            target=self._start_again, args=(index, reason), name=f"replace-{self.rank_offset}-{index}", daemon=True
        ).start()

    def drop(self, index: int, reason: str) -> None:
        """Take an engine out of service for good."""
        with self._changed:
            if self.states[index] not in (EngineState.READY, EngineState.SERVING):
                return
            self.states[index] = EngineState.MISSING
            self._changed.notify_all()
        logger.error("%s is dropped, the run goes on without it: %s", self.name_of(index), reason)
        self._remove(index)

    def _start_again(self, index: int, reason: str) -> None:
        self._remove(index)
        register = not self.takes_updates
        for attempt in range(1, MAX_START_ATTEMPTS + 1):
            logger.info("%s starts again (attempt %d of %d)", self.name_of(index), attempt, MAX_START_ATTEMPTS)
            try:
                wait_for(
                    self._launch([index], register=register),
                    what=f"{self.name_of(index)} to start again",
                    timeout_s=self.args.engine_start_timeout_s + 120,
                )
            except Exception as error:  # the edge of this thread: whatever it was, the slot must not stay half-made
                logger.exception("%s did not start", self.name_of(index))
                last = f"{type(error).__name__}: {error}"
                self._remove(index)
                continue
            self._set(index, EngineState.SERVING if register else EngineState.READY)
            return
        self._give_up(index, f"after it had ended ({reason}), {MAX_START_ATTEMPTS} new ones did not start: {last}")

    def _give_up(self, index: int, why: str) -> None:
        self.given_up = f"{self.name_of(index)} cannot be replaced: {why}"
        self._set(index, EngineState.MISSING)

    def _remove(self, index: int) -> None:
        """Take the engine from the router and kill what is left of it."""
        url = self.urls[index]
        if self.router is not None and url is not None:
            try:
                unregister_worker(ServerControl(self.router.url, name="the router"), url)
            except ProcessError as error:
                logger.warning("%s stays in the router's list: %s", self.name_of(index), error)
        first = index * self.nodes_per_engine
        actors = [actor for actor in self.actors_of(index) if actor is not None]
        # A server that is stopped or stuck would not notice the end of its actor.
        refs = [actor.kill_server.remote() for actor in actors]
        if refs:
            ray.wait(refs, num_returns=len(refs), timeout=KILL_TIMEOUT_S)
        for actor in actors:
            ray.kill(actor)
        self.all_engines[first : first + self.nodes_per_engine] = [None] * self.nodes_per_engine
        self.urls[index] = None

    def begin_rollout(self) -> None:
        """Count replacements anew."""
        self._replacements.clear()

    def wait_settled(self, timeout_s: float) -> None:
        """Until no engine is starting.

        Raises:
            DeadlineError: one still is after ``timeout_s`` seconds.
            EngineDiedError: one cannot be replaced.
        """
        with self._changed:
            settled = self._changed.wait_for(
                lambda: self.given_up is not None or not self.indices(EngineState.STARTING), timeout_s
            )
        if self.given_up is not None:
            raise EngineDiedError(self.given_up)
        if not settled:
            raise DeadlineError(
                f"{self.name_of(self.indices(EngineState.STARTING)[0])} is still starting after {timeout_s:.0f} s "
                "(--engine-start-timeout-s); look at its log"
            )

    def _set(self, index: int, state: EngineState) -> None:
        with self._changed:
            self.states[index] = state
            self._changed.notify_all()
